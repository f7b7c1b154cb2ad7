"""Transfers of a bucket on a model network in which every call blocks until the other side makes its own."""

import random
from collections.abc import Callable

import pytest

from grpo_mcore.refit.transport.network import call_order

Transfer = tuple[int, int]
"""(from member, to member)."""
Order = Callable[[int, list[int], list[int]], list[tuple[bool, int]]]


def random_transfers(seed: int) -> list[Transfer]:
    """Return the messages of one bucket, block by block, over 2 to 5 nodes of which each has up to 3 policy ranks."""
    pick = random.Random(seed)
    nodes, each = pick.randint(2, 5), pick.randint(1, 3)
    members, receivers = nodes * each, [node * each for node in range(nodes)]
    found = [(pick.randrange(members), pick.choice(receivers)) for _ in range(pick.randint(1, 40))]
    return [(sender, receiver) for sender, receiver in found if sender != receiver]


def sends_then_receives(member: int, receivers: list[int], senders: list[int]) -> list[tuple[bool, int]]:
    """The order before `call_order`: exchanges that go up to a higher member first, in the order of the blocks."""
    up = [(True, i) for i, to in enumerate(receivers) if member < to]
    up += [(False, i) for i, sender in enumerate(senders) if sender < member]
    down = [(True, i) for i, to in enumerate(receivers) if member > to]
    return up + down + [(False, i) for i, sender in enumerate(senders) if sender > member]


def all_arrive(transfers: list[Transfer], order: Order) -> bool:
    """Run the members until all transfers are done (True) or nobody can go on (False). Checks the order of messages."""
    calls: dict[int, list[tuple[bool, int, int]]] = {}
    for member in {member for transfer in transfers for member in transfer}:
        sent = [(number, to) for number, (sender, to) in enumerate(transfers) if sender == member]
        received = [(number, sender) for number, (sender, to) in enumerate(transfers) if to == member]
        calls[member] = []
        for is_send, index in order(member, [to for _, to in sent], [sender for _, sender in received]):
            number, other = sent[index] if is_send else received[index]
            calls[member].append((is_send, other, number))
    while any(calls.values()):
        for member, waiting in calls.items():
            if not waiting or not waiting[0][0]:
                continue
            _, other, number = waiting[0]
            if calls[other] and calls[other][0][:2] == (False, member):
                assert calls[other][0][2] == number, "the receiver takes this message for another one"
                waiting.pop(0)
                calls[other].pop(0)
                break
        else:
            return False
    return True


@pytest.mark.parametrize("seed", range(200))
def test_no_members_wait_for_each_other_in_a_circle(seed: int) -> None:
    assert all_arrive(random_transfers(seed), call_order)


def test_the_order_by_direction_alone_deadlocks_over_three_nodes() -> None:
    circle = [(0, 1), (0, 2), (1, 2)]
    assert all_arrive(circle, call_order) and not all_arrive(circle, sends_then_receives)
    failed = [seed for seed in range(200) if not all_arrive(random_transfers(seed), sends_then_receives)]
    assert failed, "the model tells the two orders apart"
    assert all(len({member for transfer in random_transfers(seed) for member in transfer}) > 2 for seed in failed)


def test_every_call_comes_once() -> None:
    assert sorted(call_order(1, [0, 2, 0], [2, 0])) == [(False, 0), (False, 1), (True, 0), (True, 1), (True, 2)]
    assert call_order(1, [0, 2], [0, 2]) == [(False, 0), (True, 0), (True, 1), (False, 1)]
