"""Small runs that a seed draws: topology, options, latencies and faults, on the real driver.

A run is replayed by its seed: `python -m tests.simulation.simulation SEED`. Of one that breaks a law,
`shortest` looks for the least that still breaks it.
"""

import atexit
import gc
import logging
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from grpo_mcore.algorithms.grpo import grpo_train
from grpo_mcore.base.processes import rare_collections
from grpo_mcore.cluster import is_fault
from grpo_mcore.cluster.virtual_cluster import GIVEN_UP_S, VirtualClock, VirtualCluster, VirtualWorker
from grpo_mcore.driver.run.supervise import until_over
from grpo_mcore.families import ModelShape, shape_of
from grpo_mcore.layout import LayoutError
from grpo_mcore.observe.exit_codes import LOST, STOPPED_EARLY, TERMINATED, exit_code
from grpo_mcore.recipe import MasterConfig, RecipeError
from grpo_mcore.tools.rehearse.durations import Durations, TeacherDurations
from grpo_mcore.tools.rehearse.faults import PHASES, DriverKilled, Fault, Faults, Kind
from grpo_mcore.tools.rehearse.rehearse import open_rehearsal
from grpo_mcore.tools.rehearse.world import World
from tests.simulation.laws import broken_laws, idle_engines

KINDS: tuple[Kind, ...] = (
    "kill", "kill", "kill", "hang", "pause", "slow", "full disk", "SIGTERM", "SIGUSR1", "driver", "driver", "driver",
)  # fmt: skip
STALLS = ("kill", "hang", "pause", "node")
"""Faults for which the driver waits."""
STEP_TIMEOUT_S = 60.0
USUAL_S = 15.0
"""Virtual seconds of most runs without a fault."""
LONGEST_S = 4000.0
"""Virtual seconds in which every run must be over."""
KEPT_STEPS = 2
"""Generation batches of each step in flight whose trajectories may be kept at a time: the one that trains, and one that
is generated meanwhile."""
SIGTERM_S = 30.0
"""Virtual seconds in which a run ends after SIGTERM, unless something stands still that it must wait for."""


class TooLong(BaseException):
    """The run does not end: nothing of the driver catches this."""


@dataclass(frozen=True)
class Case:
    """A small run. Its fields are drawn by `drawn`; the simplest values are the defaults."""

    seed: int
    prompts: int = 2
    generations: int = 2
    steps: int = 2
    engines: int = 1
    tensor: int = 1
    data: int = 1
    age: int = 0
    in_flight: bool = False
    apart: bool = False
    enough: int | None = None
    dynamic: bool = False
    turns: int = 1
    save_period: int = 1
    background_saves: bool = False
    max_running: int | None = None
    reward_failures: float = 0.0
    rows: int = 16
    teacher: bool = False
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        plain = Case(self.seed)
        differs = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if name != "faults" and value != getattr(plain, name)
        ]
        return " ".join([f"seed={self.seed}", *differs]) + "".join(f"\n    {fault}" for fault in self.faults)

    def recipe(self, folder: Path) -> MasterConfig:
        ahead: dict[str, Any] = {"enabled": self.age > 0, "max_trajectory_age_steps": self.age} if self.age else {}
        if self.age:
            ahead |= {"in_flight_weight_updates": self.in_flight, "min_samples_per_group": self.enough}
        ranks = self.tensor * self.data
        colocated: dict[str, Any] = {"enabled": not self.apart}
        if self.apart:
            colocated["resources"] = {"gpus_per_node": self.engines, "num_nodes": None}
        samples = self.prompts * self.generations
        taught: dict[str, Any] = {"enabled": self.teacher}
        if self.teacher:
            taught["teacher_model_by_agent_name"] = {"t0": "modelled teacher"}
        return MasterConfig.model_validate({
            "grpo": {
                "num_prompts_per_step": self.prompts, "num_generations_per_prompt": self.generations,
                "max_num_steps": self.steps, "max_num_epochs": 20, "val_period": 0, "seed": self.seed,
                "max_rollout_turns": self.turns, "async_grpo": ahead, "use_dynamic_sampling": self.dynamic,
                "batch_multiplier": 2 if self.dynamic else 1,
                "adv_estimator": {"name": "grpo", "opd_weight": 0.5 if self.teacher else 0.0},
            },
            "on_policy_distillation": taught,
            "loss_fn": {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": self.age > 0},
            "policy": {
                "model_name": "modelled", "train_global_batch_size": samples, "train_micro_batch_size": 1,
                "max_total_sequence_length": 256, "precision": "float32", "refit_buffer_size_gb": 0.001,
                "megatron_cfg": {"tensor_model_parallel_size": self.tensor},
                "generation": {
                    "max_new_tokens": 64, "num_engines": self.engines, "colocated": colocated,
                    "max_running": self.max_running,
                },
            },
            "data": {"train": {"data_path": "modelled"}},
            "env": {"math": {"num_workers": 1, "verdict_timeout_s": 20.0}},
            "checkpointing": {
                "checkpoint_dir": str(folder / "checkpoints"), "save_period": self.save_period, "keep_top_k": None,
                "metric_name": None, "is_async": self.background_saves,
            },
            "logger": {"log_dir": str(folder / "logs"), "samples": "none"},
            "cluster": {
                "gpus_per_node": ranks + (self.engines if self.apart else 0), "step_timeout_s": STEP_TIMEOUT_S,
                "max_restarts": 3, "max_engine_restarts": 6, "retry_wait_s": 1.0,
            },
            "rehearse": {
                "mean_tokens": 40, "turns": 1.5 if self.turns > 1 else 1.0, "turn_tokens": 4,
                "reward_failures": self.reward_failures, "reward_seconds": 0.2, "seed": self.seed,
            },
        })  # fmt: skip


def drawn(seed: int) -> Case:
    """Draw a case with up to three faults."""
    draw = random.Random(seed)
    age = draw.choice([0, 0, 1, 1, 2])
    tensor, data, engines = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([1, 2, 3])
    case = Case(
        seed,
        prompts=draw.choice([2, 2, 3]),
        generations=draw.choice([2, 2, 3]) if data == 1 else 2,
        steps=draw.choice([2, 2, 3]),
        engines=engines,
        tensor=tensor,
        data=data,
        age=age,
        in_flight=age > 0 and draw.random() < 0.5,
        apart=age > 0 or draw.random() < 0.3,
        enough=2 if age and draw.random() < 0.2 else None,
        dynamic=draw.random() < 0.25,
        turns=draw.choice([1, 1, 1, 3]),
        save_period=draw.choice([1, 2]),
        background_saves=draw.random() < 0.5,
        max_running=draw.choice([None, None, 2]),
        reward_failures=draw.choice([0.0, 0.0, 0.05]),
    )
    # Drawn by generators of their own: the other draws of a seed stay what they were.
    case = replace(case, teacher=random.Random(f"{seed}/teacher").random() < 0.25)
    workers = [f"engine-{number}" for number in range(engines)] * 3
    workers += [f"policy-{number}" for number in range(tensor * data)] + ["environment-math"]
    workers += [f"teacher-t0-{number}" for number in range(tensor * data * case.teacher)]
    faults = drawn_faults(draw, draw.choice([0, 1, 1, 2, 2, 3]), USUAL_S, workers, ["node-0"], KINDS)
    if faults and random.Random(f"{seed}/node").random() < 0.1:
        faults = (replace(faults[0], kind="node", target="node-0"), *faults[1:])
    return replace(case, faults=faults)


def drawn_faults(
    draw: random.Random, count: int, seconds: float, workers: Sequence[str], nodes: Sequence[str], kinds: Sequence[Kind]
) -> tuple[Fault, ...]:
    """Draw faults of a run that takes about `seconds`, half of them at calls."""
    faults = []
    for _ in range(count):
        kind = draw.choice(list(kinds))
        target = draw.choice(list(nodes)) if kind == "node" else draw.choice(list(workers))
        if kind in ("full disk", "SIGTERM", "SIGUSR1", "driver"):
            target = ""
        for_s = draw.uniform(1.0, 2 * seconds)
        if draw.random() < 0.5:
            faults.append(Fault(kind, target, draw.uniform(0.0, seconds), for_s=for_s))
        else:
            phase, after = draw.choice(list(PHASES)), draw.choice([0.0, draw.uniform(0.0, 0.5)])
            faults.append(Fault(kind, target, after, phase, draw.randint(1, 8), for_s=for_s))
    return tuple(faults)


DURATIONS = Durations(
    decode=lambda samples, tokens: 0.05 + 0.002 * samples,
    prefill=0.001,
    kv_tokens=600,
    max_samples=64,
    logprobs=lambda lengths: 0.2 + 0.001 * sum(lengths),
    train=lambda lengths: 0.5 + 0.002 * sum(lengths),
    refit=0.5,
    commit=0.05,
    offload=0.1,
    save=0.7,
    load=0.5,
    start=3.0,
    teachers={"t0": TeacherDurations(score=lambda lengths: 0.2 + 0.001 * sum(lengths), move=0.1)},
)


TINY = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
"""A model whose refit is planned in a millisecond."""


@cache
def tiny_shape() -> ModelShape:
    return shape_of(TINY)


@dataclass
class Outcome:
    """How a simulated run ended. `flaws`: the laws that it broke; `happened`: the faults."""

    code: int
    flaws: list[str]
    happened: list[Fault]
    seconds: float
    errors: list[str] = field(default_factory=list)


def simulate(case: Case, folder: Path | None = None) -> Outcome:
    """Run a case to its end, and check the laws."""
    with _folder(folder) as place, _silence():
        return _simulate(case, place)


def _simulate(case: Case, folder: Path) -> Outcome:
    config = case.recipe(folder)
    clock = VirtualClock(case.seed)
    world = World(config, DURATIONS, clock, case.seed)
    faults, clusters = Faults(case.faults, world), list[VirtualCluster]()
    errors, early = list[str](), list[str]()  # that ended a start; those before its loop began
    most_kept = KEPT_STEPS * case.prompts * case.generations * (case.age + 1) * (2 if case.dynamic else 1)

    def observe(worker: VirtualWorker, method: str) -> None:
        faults.observe(worker, method)
        kept_refs = worker.cluster.store.kept
        if method == "train" and len(kept_refs) > most_kept:
            gc.collect()  # the traceback of a worker's death holds what its caller held, until it is collected
            if (kept := len(kept_refs)) <= most_kept:
                return
            world.flaws.append(f"step {world.step} trains, and {kept} samples are kept of at most {most_kept}")

    def attach(cluster: VirtualCluster) -> None:
        clusters.append(cluster)
        faults.attach(cluster)

    def attempt(resume: str | bool | None) -> tuple[int, str | None]:
        begun = False
        try:
            stop = faults.request()
            with open_rehearsal(
                config, tiny_shape(), world, gpu=False, resume=resume, rows=case.rows,
                teachers={"t0": tiny_shape()}, observe=observe, on_cluster=attach,
            ) as run:  # fmt: skip
                begun = True
                if run.grpo_save_state["current_step"] >= config.grpo.max_num_steps:
                    return 0, None
                return exit_code(grpo_train(**vars(run), stop=stop)), None
        except DriverKilled:
            return 137, "its driver was killed"
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}".partition("\n")[0])
            early.extend([] if begun else errors[-1:])
            return (LOST, errors[-1]) if is_fault(error) else (1, None)
        finally:
            faults.detach()

    def too_long() -> None:
        raise TooLong

    clock.after(LONGEST_S, too_long)
    code, flaws = STOPPED_EARLY, list[str]()
    while code in (STOPPED_EARLY, TERMINATED) and not flaws:  # a run that was asked to stop is started again
        stops = len(faults.happened)
        try:
            code = until_over(
                attempt, config, any(Path(config.checkpointing.checkpoint_dir).glob("step_*")) or None, clock=clock
            )
        except TooLong:
            code, flaws = -1, [f"it has not ended after {LONGEST_S:.0f} virtual seconds"]
            break
        flaws = [*broken_laws(world, config, code), *idle_engines(world.engines, case.prompts)]
        # A second worker that stands still is noticed when engines are to leave a refit, when ranks are to close it, or
        # when somebody asks for its health: each is a wait of its own.
        waits = 1 if sum(fault.kind in STALLS for fault in faults.happened) <= 1 else 3
        overdue = [late for cluster in clusters for late in cluster.overdue]
        flaws += [text for seconds, text in overdue if seconds > waits * GIVEN_UP_S]
        flaws += _unforced(faults, code, errors, early, clock.now(), stops)
    return Outcome(code, flaws, faults.happened, clock.now(), errors)


def _unforced(
    faults: Faults, code: int, errors: Sequence[str], early: Sequence[str], ended_at: float, before: int
) -> Iterator[str]:
    """Yield what went wrong although nothing that happened forced it. `early`: the errors of starts that were lost
    before their loop began, where nothing is replaced; `before`: number of faults before the last start."""
    happened = faults.happened
    of_policy = any(fault.target.startswith(("policy", "node")) and fault.kind != "slow" for fault in happened)
    stands_still = any(fault.kind in ("hang", "pause") for fault in happened)
    if errors and code == 1:
        yield f"exit code 1: {errors[-1]}"
    elif lost := [error for error in errors if not of_policy and error not in early and not _of_a_start(error)]:
        yield f"the run was lost, and no rank was: {lost[0]}"
    elif any("DeadlineExceeded" in error for error in errors) and not stands_still:
        yield f"nothing stood still, and it waited too long: {errors[-1]}"
    if of_policy or stands_still or errors or any(fault.kind == "driver" for fault in happened):
        return
    ahead = faults.world.config.grpo.async_grpo.enabled
    for fault, at, step in list(zip(happened, faults.times, faults.steps, strict=True))[before:]:
        if fault.kind == "SIGTERM" and ended_at - at > SIGTERM_S:
            yield f"it ended {ended_at - at:.0f} s after SIGTERM"
        alone = len(happened) == 1  # others make steps that are trained again, or a start that is repeated
        begun = 1 + (ahead and fault.kind == "SIGUSR1")  # also a step whose prompts are generated ahead
        if alone and fault.kind in ("SIGTERM", "SIGUSR1") and (more := faults.world.step - step) > begun:
            yield f"it trained {more} further steps after {fault.kind}"


def _of_a_start(error: str) -> bool:
    """Return whether a worker was lost while it started, also again."""
    return "its constructor" in error or "start of " in error


@contextmanager
def _folder(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    place = _folder_of_process() / "run"
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@cache
def _folder_of_process() -> Path:
    """Return a folder in memory for the runs of this process. They share its name, so that what is kept of recipes,
    such as the text of their sections, is kept for all."""
    place = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


@contextmanager
def _silence() -> Iterator[None]:
    package = logging.getLogger("grpo_mcore")
    before = package.disabled
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
        package.disabled = before


def shortest(case: Case, flaw: str | None = None) -> Case:
    """Return the simplest case that can be made of this one by steps, and still breaks a law. `flaw`: the kind of flaw
    to keep, by its first word; None: any."""

    def breaks(candidate: Case) -> bool:
        flaws = simulate(candidate).flaws
        return bool(flaws) and (flaw is None or any(one.partition(" ")[0] == flaw for one in flaws))

    plain, simpler = Case(case.seed), True
    while simpler:
        simpler = False
        smaller = [replace(case, faults=(*case.faults[:i], *case.faults[i + 1 :])) for i in range(len(case.faults))]
        smaller += [
            replace(case, **{name: value})
            for name, value in vars(plain).items()
            if name not in ("seed", "faults") and getattr(case, name) != value
        ]
        for candidate in smaller:
            try:
                if breaks(candidate):
                    case, simpler = candidate, True
                    break
            except (RecipeError, LayoutError):  # a recipe that is not possible
                continue
    return case


def main(words: Sequence[str]) -> int:
    """Simulate the seeds of the command line: a number, or two for a range. Print what breaks a law."""
    first, last = int(words[0]), int(words[-1])
    broken = 0
    with rare_collections():  # each run has its own, which looks through all that is imported
        for seed in range(first, last + 1):
            case = drawn(seed)
            outcome = simulate(case)
            if outcome.flaws or first == last:
                broken += bool(outcome.flaws)
                print(f"{case}\n  exit code {outcome.code} after {outcome.seconds:.1f} s; {'; '.join(outcome.errors)}")
                for flaw in outcome.flaws:
                    print(f"  BROKEN: {flaw}")
    print(f"{last - first + 1} runs, {broken} of them break a law")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
