"""The states of one refit and the only ways between them."""

from __future__ import annotations

from enum import Enum

from grpo_mcore.refit.plan import RefitError


class RefitState(Enum):
    IDLE = "idle"
    PLANNED = "planned"  # every side has opened the same plan on the same buffer
    STAGING = "staging"  # buckets move
    COMMITTING = "committing"  # every bucket is loaded, the engines take the new weight version
    COMMITTED = "committed"
    ABORTED = "aborted"


NEXT: dict[RefitState, frozenset[RefitState]] = {
    RefitState.IDLE: frozenset({RefitState.PLANNED, RefitState.ABORTED}),
    RefitState.PLANNED: frozenset({RefitState.STAGING, RefitState.ABORTED}),
    RefitState.STAGING: frozenset({RefitState.COMMITTING, RefitState.ABORTED}),
    RefitState.COMMITTING: frozenset({RefitState.COMMITTED, RefitState.ABORTED}),
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
