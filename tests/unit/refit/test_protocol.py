from itertools import product

import pytest

from grpo_mcore.refit.plan.plan import RefitError
from grpo_mcore.refit.refit import NEXT, RefitState, advanced

PAIRS = list(product(RefitState, RefitState))


@pytest.mark.parametrize(("state", "to"), PAIRS, ids=lambda state: state.value)
def test_only_the_listed_steps_exist(state: RefitState, to: RefitState) -> None:
    if to in NEXT[state]:
        assert advanced(3, state, to) is to
    else:
        with pytest.raises(RefitError, match=f"weight version 3: no way from {state.value} to {to.value}"):
            advanced(3, state, to)


def test_every_state_can_end_and_the_ends_are_final() -> None:
    ends = {state for state, after in NEXT.items() if not after}
    assert ends == {RefitState.COMMITTED, RefitState.ABORTED}
    assert all(RefitState.ABORTED in after for state, after in NEXT.items() if state not in ends)
