"""Functions by which `Rollouts` reports while it samples."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from grpo_mcore.environments.agents.samples import AgentOutcome


@dataclass(frozen=True)
class RolloutHooks:
    """Functions that `Rollouts` calls while it samples."""

    on_sample: Callable[[], None] = lambda: None
    """Called for each sample when its last turn is generated."""
    on_retry: Callable[[str, str], None] = lambda uid, reason: None
    """Gets the uid of each prompt of which something is generated again, and the reason."""
    on_restart: Callable[[str, str], None] = lambda worker, reason: None
    """Gets the name of each worker that is restarted, and the reason."""
    on_outcome: Callable[[AgentOutcome], None] | None = None
    """Gets every outcome of environments that run agents."""
    on_span: Callable[[str, str, float, float], None] = lambda worker, action, start, end: None
    """Gets (worker, what it did, start, end) of each call that has ended, by the cluster's clock."""
    phase: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext()
    """Opens the phase in which `next_group` waits: "generate" while samples are generated, "reward" while only rewards
    are awaited."""
    restore_engines: Callable[[], object] | None = None
    """Waits for restarted engines and refits them; called only in `next_group`, when the policy is idle."""


NO_HOOKS = RolloutHooks()
