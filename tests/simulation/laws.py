"""Laws that every run must keep, whatever breaks. They are checked on what it leaves behind."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from grpo_mcore.driver.checkpoints.checkpoint_files import POLICY, damage
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager
from grpo_mcore.observe import LEDGER_FILE, audit, read_ledger
from grpo_mcore.observe.exit_codes import STOPPED_EARLY, TERMINATED
from grpo_mcore.observe.ledger.ledger_audit import valid_entries
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.tools.rehearse.modelled_policy import WEIGHTS
from grpo_mcore.tools.rehearse.world import StartedEngine, World


def broken_laws(world: World, config: MasterConfig, code: int) -> Iterator[str]:
    """Yield what is wrong with a run that has ended with this exit code."""
    yield from world.flaws
    folder = Path(config.checkpointing.checkpoint_dir)
    ledger = folder / LEDGER_FILE
    entries = read_ledger(ledger) if ledger.exists() else []
    yield from (f"ledger: {flaw}" for flaw in audit(entries).flaws)
    yield from _weights(world, config, entries if code in (0, STOPPED_EARLY, TERMINATED) else None)
    for engine, named, came in world.commits:
        if named != came:
            yield f"{engine} committed weights {came} as version {named}"
    for path in sorted(folder.glob("step_*")):
        if (problem := damage(path)) is not None:
            yield f"checkpoint {path.name} is damaged: {problem}"
        elif not (path / POLICY / WEIGHTS).exists():
            yield f"checkpoint {path.name} was complete before the ranks had written their weights"
    yield from _end(world, config, code, folder)


def _weights(world: World, config: MasterConfig, entries: list[dict[str, object]] | None) -> Iterator[str]:
    """Compare what the weights were really trained on with the rules, and with the ledger of a run that came to an
    orderly end."""
    history = world.weights.history if world.weights is not None else []
    limit = config.grpo.async_grpo.max_age
    for (uid, index), count in Counter((sample.uid, sample.index) for sample in history).items():
        if count > 1:
            yield f"the weights were trained on {uid}#{index} {count} times"
    for sample in history:
        name = f"{sample.uid}#{sample.index}, trained on in step {sample.step},"
        if sample.claimed != sample.real:
            yield f"{name} claims weights {sample.claimed}, and is of weights {sample.real}"
        if sample.step - sample.real > limit:
            yield f"{name} is of weights {sample.real}: older than the limit of {limit}"
    if entries is not None:
        told = {uid for entry in valid_entries(entries) if entry["event"] == "trained" for uid in entry["uids"]}
        really = {sample.uid for sample in history}
        if unheard := sorted(really - told)[:3]:
            yield f"the weights were trained on {', '.join(unheard)}, of which the ledger knows nothing"
        if untrained := sorted(told - really)[:3]:
            yield f"the ledger says that {', '.join(untrained)} was trained on, and the weights were not"


def _end(world: World, config: MasterConfig, code: int, folder: Path) -> Iterator[str]:
    trained = max((sample.step for sample in world.weights.history), default=0) if world.weights else 0
    steps = config.grpo.max_num_steps
    if code == 0 and world.step != steps + 1:
        yield f"exit code 0 after {world.step - 1} of {steps} steps"
    if code in (0, STOPPED_EARLY, TERMINATED) and trained and config.checkpointing.enabled:
        newest = CheckpointManager(config.checkpointing).latest()
        if newest is None or int(newest.name.removeprefix("step_")) != world.step - 1:
            yield f"exit code {code}, and step {world.step - 1} is not saved (newest: {newest and newest.name})"


def idle_engines(engines: list[StartedEngine], prompts: int) -> Iterator[str]:
    """Yield the engines that got no work although they kept the current weights for several steps, each of which had a
    prompt for each engine."""
    for engine in engines:
        if engine.refits >= 4 and not engine.requested and prompts >= len({one.name for one in engines}):
            yield f"{engine.name} took part in {engine.refits} refits and was never asked for a sample"
