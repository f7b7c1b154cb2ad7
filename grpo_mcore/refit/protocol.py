"""The states of one refit and the only ways between them."""

from __future__ import annotations

from enum import Enum

from grpo_mcore.refit.plan import RefitError


class RefitState(Enum):
    IDLE = "idle"
    PLANNED = "planned"  # every side has opened the same plan on the same buffer
    STAGING = "staging"  # buckets move; the engines may generate with the old weights
    STAGED = "staged"  # the new weights lie, checked, beside the old ones
    COMMITTING = "committing"  # the engines stand still and exchange old for new; each can still go back
    COMMITTED = "committed"
    ABORTED = "aborted"  # every engine that lives is on the old weights


_ORDER = (
    RefitState.IDLE,
    RefitState.PLANNED,
    RefitState.STAGING,
    RefitState.STAGED,
    RefitState.COMMITTING,
    RefitState.COMMITTED,
)
NEXT: dict[RefitState, frozenset[RefitState]] = {
    **{state: frozenset({after, RefitState.ABORTED}) for state, after in zip(_ORDER, _ORDER[1:], strict=False)},
    RefitState.COMMITTED: frozenset(),
    RefitState.ABORTED: frozenset(),
}


class RefitProtocol:
    """Where one refit to `version` stands."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.state = RefitState.IDLE

    def advance(self, to: RefitState) -> None:
        """Raises RefitError for a step that the protocol does not have."""
        if to not in NEXT[self.state]:
            raise RefitError(
                f"refit to weight version {self.version}: no way from {self.state.value} to {to.value}; "
                f"possible: {sorted(state.value for state in NEXT[self.state]) or 'none, it has ended'}"
            )
        self.state = to
