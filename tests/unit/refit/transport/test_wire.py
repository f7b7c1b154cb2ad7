"""Policy ranks and nodes that share no memory, as threads of this process with a real Gloo network between them."""

import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.families import params_of
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.engine_side import receiver
from grpo_mcore.refit.plan.delivery import Deliveries
from grpo_mcore.refit.plan.parts import parts_of
from grpo_mcore.refit.plan.plan import RefitError, plan_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.refit import EngineNodes, refit
from grpo_mcore.refit.transport import shared_memory
from grpo_mcore.refit.transport.board import Seat
from grpo_mcore.refit.transport.network import Network
from tests.unit.refit.engine_nodes import RANKS, Node
from tests.unit.refit.shards import SHAPE, Source, in_a_thread, index

pytestmark = pytest.mark.slow  # processes that send to each other


class ThreadHandle:
    """Calls run in order, each in a thread of its own."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target
        self._last: Future[Any] | None = None

    def call(self, method: str, *args: Any, timeout_s: float, purpose: str) -> Any:
        before = self._last

        def run() -> Any:
            if before is not None:
                before.exception()
            return getattr(self.target, method)(*args)

        self._last = in_a_thread(run)
        return self._last


class Setting:
    """`node_of_rank`: the node of each policy rank if policy and engines share nodes. `span`: nodes of one engine."""

    def __init__(self, nodes: int, node_of_rank: Sequence[int] = (), span: int = 1) -> None:
        self.node_of_rank, self.span = node_of_rank, span
        layout = PolicyLayout(2, 1, 2)
        self.plan = plan_refit(params_of(SHAPE), SHAPE, layout, EngineLayout(RANKS), dtype="float32", buffer_bytes=8192)
        self.sources = [Source(rank % 2, 2) for rank in range(4)]
        self.senders = [RefitSender(source, rank, run_id="test") for rank, source in enumerate(self.sources)]
        self.nodes = [Node(self.plan) for _ in range(nodes)]

    def refit(self, version: int, timeout_s: float = 30.0) -> Any:
        policy = [ThreadHandle(f"policy-{rank}", sender) for rank, sender in enumerate(self.senders)]
        hosts = [ThreadHandle(f"engine-{number}", node) for number, node in enumerate(self.nodes)]
        numbers = range(0, len(hosts), self.span)
        nodes = EngineNodes([range(first, first + self.span) for first in numbers], hosts)
        engines = [hosts[first] for first in numbers]
        return refit(
            policy, engines, self.plan, version, nodes=nodes, node_of_rank=self.node_of_rank, timeout_s=timeout_s
        )

    def needed(self) -> list[tuple[int, int]]:
        """(node, bytes) of each block on each node, that an engine rank there reads."""
        each = RANKS // self.span
        return [
            (node, block.nbytes)
            for block in self.plan.blocks()
            for node in range(len(self.nodes))
            if any(read.rank // each == node % self.span for read in block.reads)
        ]

    def check(self) -> None:
        for node in self.nodes:
            for block, found in node.arrived():
                expected = self.sources[block.source].parameters()[block.param][index(block.box)]
                assert torch.equal(found, expected), block.param

    def close(self) -> None:
        for sender in self.senders:
            sender.close_refit()
        for node in self.nodes:
            node.close_receiver()


def test_engines_with_gpus_of_their_own_read_what_arrives_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine's GPU receives for all of the node, and the others do not see it: no CUDA IPC."""
    network = {"receivers": [4], "node_of_rank": [-1] * 4}
    on_gpu = SimpleNamespace(device=torch.device("cuda"), description=network, close=lambda **_: None)
    monkeypatch.setattr(receiver, "Network", lambda *_: on_gpu)
    monkeypatch.setattr(shared_memory, "pin", lambda flat: None)
    monkeypatch.setattr(shared_memory, "unpin", lambda flat: None)
    plan = plan_refit(
        params_of(SHAPE), SHAPE, PolicyLayout(2, 1, 2), EngineLayout(RANKS), dtype="float32", buffer_bytes=8192
    )
    node, parts = Node(plan), parts_of(plan, 4, (-1,) * 4, ((0, 1),), (4,))
    opened = node.open_receiver(network, parts.receivers[0], 0, Seat(1, 0, 1, 2, 5.0))
    node.close_receiver()
    assert opened["transport"]["buffer"]["kind"] == "shared_memory"


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_every_node_gets_every_block(nodes: int) -> None:
    setting = Setting(nodes)
    for version in (1, 2):
        assert setting.refit(version).version == version
        setting.check()
        assert all(len(node.seen) == len(list(setting.plan.blocks())) for node in setting.nodes)
    deliveries = Deliveries(setting.plan, (), [range(RANKS)] * nodes)
    senders = {sender for block in setting.plan.blocks() for _, sender in deliveries.of(block)}
    assert len(senders) == 4, "replicas share the work"
    setting.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every message over the wire, from now on."""
    found: list[int] = []
    honest = Network.exchange

    def exchange(self: Network, messages: Any, places: Any) -> None:
        found.extend(message.numel() for message, _ in messages)
        honest(self, messages, places)

    monkeypatch.setattr(Network, "exchange", exchange)
    return found


@pytest.mark.parametrize(
    ("nodes", "node_of_rank", "over_the_wire"),
    [
        (2, (0, 0, 1, 1), False),  # a whole copy of the policy on each node
        (2, (0, 1, 0, 1), True),  # tensor parallel over the boundary: half of two copies
        (1, (0, 0, -1, -1), False),  # engines beside half of the policy
        (1, (0, -1, 0, -1), True),
    ],
)
def test_policy_ranks_bring_what_their_node_holds_and_send_the_rest(
    nodes: int, node_of_rank: Sequence[int], over_the_wire: bool, sent: list[int]
) -> None:
    setting = Setting(nodes, node_of_rank)
    held = [
        (block.nbytes, {node_of_rank[rank] for rank in setting.plan.holders[block.holders]})
        for block in setting.plan.blocks()
    ]
    missing = sum(nbytes for node in range(nodes) for nbytes, where in held if node not in where)
    assert (missing > 0) == over_the_wire
    for version in (1, 2):
        sent.clear()
        assert setting.refit(version).version == version
        setting.check()
        assert all(len(node.seen) == len(list(setting.plan.blocks())) for node in setting.nodes)
        assert sum(sent) == missing, "a block that a rank of the node holds does not travel"
    setting.close()


@pytest.mark.parametrize(
    ("nodes", "node_of_rank"),
    [(2, (0, 0, 1, 1)), (2, (0, 1, 0, 1)), (2, (1, 0, -1, -1)), (4, (0, 1, 2, 3)), (2, ()), (4, ())],
)
def test_a_node_of_an_engine_over_several_gets_what_its_ranks_read(
    nodes: int, node_of_rank: Sequence[int], sent: list[int]
) -> None:
    setting = Setting(nodes, node_of_rank, span=2)
    needed = setting.needed()
    assert sum(nbytes for _, nbytes in needed) < nodes * setting.plan.block_bytes
    for version in (1, 2):
        sent.clear()
        assert setting.refit(version).version == version
        setting.check()
        assert sum(len(node.seen) for node in setting.nodes) == len(needed)
        if not node_of_rank:
            assert sum(sent) == sum(nbytes for _, nbytes in needed), "moved bytes are the planned ones"
        else:
            assert sum(sent) < sum(nbytes for _, nbytes in needed)
    setting.close()


def test_a_node_of_engines_without_a_policy_rank_is_refused() -> None:
    with pytest.raises(RefitError, match=r"no policy rank is on the engine nodes \[1\]"):
        Setting(2, (0, 0, 0, 0)).refit(1)


@pytest.mark.parametrize("node_of_rank", [(), (0, 1, 0, 1)])
@pytest.mark.parametrize("who", ["sender", "reader"])
def test_a_rank_that_fails_ends_it_for_all_at_once_and_the_next_refit_works(
    node_of_rank: Sequence[int], who: str
) -> None:
    """Nobody waits for a deadline: who fails leaves board and network, and the others see it."""
    setting = Setting(2, node_of_rank)
    setting.refit(1)

    def fail(number: int, *checked: Any) -> Any:
        if number == 1:
            raise RuntimeError("out of luck")
        return honest(number, *checked)

    target, method = (setting.senders[3], "fill_bucket") if who == "sender" else (setting.nodes[1], "take_bucket")
    honest = getattr(target, method)
    setattr(target, method, fail)
    began = time.monotonic()
    with pytest.raises(RefitError) as caught:
        setting.refit(2, timeout_s=90.0)
    assert time.monotonic() - began < 60.0
    assert "out of luck" in " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert [node.version for node in setting.nodes] == [1, 1] and all(node.aborted for node in setting.nodes)
    setattr(target, method, honest)
    assert setting.refit(3).version == 3
    setting.check()
    setting.close()


@pytest.mark.parametrize("wrong", ["127.0.1.1", "192.0.2.1"])
def test_the_machines_own_name_is_not_asked(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives a machine's name 127.0.1.1; elsewhere it belongs to a network that others lack."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: wrong)
    sender = RefitSender(Source(0, 1), 0, run_id="test", address="127.0.0.2")
    description = sender.host_network(2, [1], [-1], 30.0)
    assert description["host"] == "127.0.0.2"
    sender.close_refit()


def test_a_network_that_is_left_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NCCL group that is only forgotten keeps its device memory."""
    setting, shut = Setting(1), []
    setting.refit(1)
    members = [setting.senders[0], setting.nodes[0]]
    for member in members:
        group = member._network._group
        member._network._group = SimpleNamespace(shutdown=lambda group=group: shut.append(group) or group.shutdown())
    setting.close()
    assert len(shut) == len(members)
