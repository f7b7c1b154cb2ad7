"""Policy and engine on two machines whose own names lead to 127.0.1.1, as on Debian and Ubuntu."""

import socket
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import all_reduce, destroy_process_group, init_process_group

from grpo_mcore.base.addresses import gloo_towards
from grpo_mcore.families import params_of
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.plan import plan_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.refit import EngineNodes, refit
from tests.functional.two_nodes import ADDRESSES, nodes, why_not, workers
from tests.unit.refit.engine_nodes import Node
from tests.unit.refit.shards import SHAPE, Source, index

REASON = why_not()
PORT = 29400
PLAN = plan_refit(params_of(SHAPE), SHAPE, PolicyLayout(), EngineLayout(2), dtype="float32", buffer_bytes=8192)


class Rank(RefitSender):
    """The only policy rank, on the first node."""

    def __init__(self) -> None:
        super().__init__(Source(0, 1), 0, address=ADDRESSES[0])

    def name(self) -> str:
        return socket.gethostbyname(socket.gethostname())

    def meet(self) -> float:
        return meet(0)


class Engine(Node):
    """The engine, on the second node."""

    def __init__(self) -> None:
        super().__init__(PLAN)

    def meet(self) -> float:
        return meet(1)

    def check(self) -> None:
        sent = Source(0, 1).parameters()
        received = list(self.arrived())
        assert {block.param for block, _ in received} == sent.keys()
        for block, values in received:
            assert torch.equal(values, sent[block.param][index(block.box)]), block.param


def meet(rank: int) -> float:
    """Sum over both nodes, as policy ranks under Gloo do."""
    gloo_towards(ADDRESSES[0])
    init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=2)
    total = torch.ones(3)
    all_reduce(total)
    destroy_process_group()
    return float(total.sum())


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_refit_between_nodes_whose_names_lead_to_themselves_ends_in_seconds(tmp_path: Path) -> None:
    with nodes() as names:
        here = f"{__name__}:"
        places = {"policy-0": (names[0], here + "Rank"), "engine-0": (names[1], here + "Engine")}
        with workers(tmp_path, places) as started:
            policy, engine = started["policy-0"], started["engine-0"]
            assert policy.call("name").result() == "127.0.1.1"
            began = time.monotonic()
            for version in (1, 2):
                report = refit([policy], [engine], PLAN, version, nodes=EngineNodes([[0]], [engine]), timeout_s=60.0)
                assert report.version == version
            assert time.monotonic() - began < 30.0
            engine.call("check").result()
            both = [policy.call("meet"), engine.call("meet")]
            assert [answer.result(timeout=60) for answer in both] == [6.0, 6.0]
