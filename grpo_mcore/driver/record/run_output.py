"""Console, events, alarms, throughput and summary of a run, the same for all algorithms."""

import logging
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from grpo_mcore.driver.interfaces import GenerationInterface, PolicyInterface
from grpo_mcore.driver.record.sample_writer import SampleWriter
from grpo_mcore.families import forward_flops, parameter_count
from grpo_mcore.observe import Logger, RunConsole, StepRow, read_metrics, write_summary
from grpo_mcore.observe.alarms import StepAlarms
from grpo_mcore.observe.band import band_of
from grpo_mcore.observe.console.console import WIDTH
from grpo_mcore.observe.console.heartbeat import expect
from grpo_mcore.observe.exit_codes import RunEnd
from grpo_mcore.observe.logger import METRICS_FILE
from grpo_mcore.observe.machine import throughput
from grpo_mcore.observe.spans import SpanFile
from grpo_mcore.recipe import Algorithm, MasterConfig, world_size

log = logging.getLogger(__name__)


class RunOutput:
    """The console and the files of a run. `samples` and `spans` write the files of samples and events; `time` is the
    clock of the run's cluster."""

    def __init__(
        self,
        algorithm: Algorithm,
        logger: Logger,
        config: MasterConfig,
        policy: PolicyInterface,
        engines: GenerationInterface,
        tokenizer: Any,
        step: Callable[[], int],
        *,
        decodes: bool = False,
    ) -> None:
        """`step`: returns the number of steps that are done. `decodes`: see SampleWriter."""
        self.logger, self.config, self._policy = logger, config, policy
        self.time = time = policy.cluster.clock
        self.console = RunConsole(kept=logger.console, clock=time.now)
        self.samples = SampleWriter(config.logger, logger.log_dir, policy.cluster, tokenizer, decodes=decodes)
        self.spans = SpanFile(logger.log_dir, step=lambda: step() + 1, clock=time)
        self.spans.begin(devices_of(policy, engines), engines.colocated, algorithm)
        band, reason = band_of(config.model_dump(mode="json"))
        if reason is not None:
            log.warning("%s", reason)
        self.alarms, self._first_step = StepAlarms(config.logger.alarms.stop_after, band), step() + 1
        if self.alarms.band is not None:  # also of the steps before a run was resumed
            for row in read_metrics(logger.log_dir / METRICS_FILE, "train"):
                if row["step"] < self._first_step:
                    self.alarms.band.sign(row["step"], row)
        self._tokens = 0  # of the samples of all steps
        self._began = time.now()
        self._phases = {"start": self._began - logger.opened}  # seconds
        logger.log_hyperparams(config)

    def span(self, name: str, start: float, end: float) -> None:
        """Record a phase of the loop, or what it paused for."""
        self.spans.phase(name, start, end)
        if "/" not in name:
            self._phases[name] = self._phases.get(name, 0.0) + end - start

    def close(self) -> None:
        """Write the samples that are left, and close the files of samples and events."""
        expect(0.0)
        self.samples.close()
        self.spans.close()

    def describe_policy(self) -> str:
        """Return model, size, number format and layout of the policy, for the banner."""
        policy = self._policy
        millions = parameter_count(policy.shape) / 1e6
        return f"{policy.shape.family}, {millions:.1f} M parameters, {policy.precision}, {policy.layout.describe()}"

    def speed(
        self, tokens: float, lengths: list[int], seconds: Mapping[str, float], computed: float = 1.0
    ) -> dict[str, float]:
        """Return seconds, throughput and FLOPs of the step that was just trained on samples of these lengths: three
        forward passes' worth for forward and backward. `seconds`: spent in each phase; `computed`: share of the tokens
        that is computed."""
        self._tokens += int(tokens)
        timing = {f"timing/{name}": spent for name, spent in seconds.items()}
        return (
            timing
            | {"tokens_per_second": tokens / seconds["total"]}
            | throughput(
                tokens=tokens,
                flops=3 * computed * forward_flops(self._policy.shape, lengths) if lengths else 0.0,
                total_s=seconds["total"],
                train_s=seconds.get("train", 0.0),
                devices=self.config.cluster.num_nodes * self.config.cluster.gpus_per_node,
                ranks=world_size(self.config),
                peak=self.logger.peak_flops,
            )
        )

    def show_step(self, step: int, metrics: Mapping[str, float], line: StepRow | str | None) -> None:
        """Write the metrics of the step that was just trained and the times of its ranks, print its line (a row of the
        table, or text), and what is alarming, each kind once."""
        for worker, optimizer_steps in zip(self._policy.workers, self._policy.train_times, strict=False):
            for times in optimizer_steps:
                self.spans.optimizer_step(worker.name, times)
        self.spans.flush()
        expect(2 * metrics.get("timing/total", 0.0))
        self.logger.restore()
        self.logger.log_metrics(metrics, step, "train")
        self.logger.log_surroundings(step)
        if isinstance(line, StepRow):
            self.console.step(line)
        elif line is not None:
            self.console.note(line)
        for alarm in self.alarms.of_step(step, metrics):
            self.console.note("\n".join(textwrap.wrap(f"ALARM in step {step}, said once: {alarm.text}", WIDTH)))
            self.logger.alarm(alarm)

    def times(self) -> dict[str, Any]:
        """Return what a summary says of the time: seconds since the start was over, and by phase with the start."""
        seconds = self.time.now() - self._began
        phases = dict(self._phases)
        phases["other"] = max(seconds + phases["start"] - sum(phases.values()), 0.0)
        return {
            "seconds": round(seconds, 2),
            "seconds_by_phase": {name: round(spent, 2) for name, spent in phases.items()},
            "tokens_per_second": round(self._tokens / seconds, 1) if seconds else 0.0,
        }

    def trouble(self) -> dict[str, Any]:
        """Return the alarms and outages of a summary, if there were any, and whether the run is inside its band."""
        lists = {"alarms": [asdict(alarm) for alarm in self.alarms.raised], "outages": self.logger.outages()}
        return self._band() | {name: entries for name, entries in lists.items() if entries}

    def trouble_facts(self) -> dict[str, str]:
        """Return the same as lines for the console."""
        alarms = {f"ALARM, step {alarm.step}": alarm.text for alarm in self.alarms.raised}
        return self._band() | alarms | self.logger.outages()

    def _band(self) -> dict[str, str]:
        test = self.alarms.band
        if test is None or not test.evidence:  # it has not looked yet
            return {}
        return {"band": f"{'outside' if test.text else 'inside'} the {test.band.name}"}

    def write_summary(self, summary: Mapping[str, Any], steps: int) -> None:
        """Write summary.json of a run with so many steps done. A resumed run that had none left to do keeps that of the
        run before it."""
        path, self.logger.end = self.logger.log_dir / "summary.json", RunEnd.of(summary)
        with left_out_if_it_fails(f"the summary {path}"):
            if steps >= self._first_step:
                write_summary(path, summary)
            else:
                self.logger.put_summary_back()


def devices_of(policy: PolicyInterface, engines: GenerationInterface) -> dict[str, list[str]]:
    """Return the processes on each device of the run: engines share those of the policy's ranks, or have their own."""
    devices = {worker.name: [worker.name] for worker in policy.workers}
    for number, engine in enumerate(engines.workers):
        if engines.colocated:  # consecutive ranks, as engines are placed
            share = len(policy.workers) / len(engines.workers)
            for worker in policy.workers[int(number * share) : max(int((number + 1) * share), int(number * share) + 1)]:
                devices[worker.name].append(engine.name)
        else:
            parts = engines.layout.tensor
            devices |= {f"{engine.name}.{part}" if parts > 1 else engine.name: [engine.name] for part in range(parts)}
    return devices


@contextmanager
def left_out_if_it_fails(part: str) -> Iterator[None]:
    """Log an error of the block: what only describes a run must not change how it ends."""
    try:
        yield
    except Exception as error:  # of the disk, of matplotlib, of a model that the plan does not know
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        log.warning("%s is left out, since it failed: %s", part, reason)
