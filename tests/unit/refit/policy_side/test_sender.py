import pytest
import torch
from torch import Tensor

from grpo_mcore.families import params_of
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.refit.plan.parts import parts_of
from grpo_mcore.refit.plan.plan import RefitError, RefitPlan, plan_refit
from grpo_mcore.refit.plan.proof import checksum, first_difference, is_checked
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.transport.board import Seat
from grpo_mcore.refit.transport.buffer import attach_buffer, block_view
from tests.unit.refit.shards import SHAPE, Source, index, random_weights


def plan(size: int = 1, dtype: str = "float32", engine: int = 1) -> RefitPlan:
    return plan_refit(params_of(SHAPE), SHAPE, PolicyLayout(size), EngineLayout(engine), dtype=dtype, buffer_bytes=8192)


def open_all(senders: list[RefitSender], plan: RefitPlan) -> list[dict]:
    """Open a refit to an engine of one node, as the driver does."""
    seats = [Seat(1, rank, len(senders), 1, 30.0) for rank in range(len(senders))]
    parts = parts_of(plan, len(senders), (), (), ()).senders
    answers = [senders[0].open_refit(parts[0], seats[0])]
    transport = answers[0]["transport"]
    others = zip(senders[1:], parts[1:], seats[1:], strict=True)
    return answers + [sender.open_refit(part, seat, transport) for sender, part, seat in others]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_are_the_ranks_parameters_bit_for_bit(size: int, dtype: str) -> None:
    wanted = plan(size, dtype)
    assert len(wanted.buckets) >= 3, "halves are used again"
    sources = [Source(rank, size) for rank in range(size)]
    senders = [RefitSender(source, rank, run_id="test") for rank, source in enumerate(sources)]
    transport = None
    for seed in (1, 2):
        for source in sources:
            source.weights = random_weights(seed)
        held = [source.parameters() for source in sources]
        opened = open_all(senders, wanted)
        assert transport in (None, opened[0]["transport"]), "the buffer stays mapped"
        transport = opened[0]["transport"]
        assert {answer["digest"] for answer in opened} == {wanted.digest}
        assert sum(answer["bytes"] for answer in opened) == wanted.block_bytes
        buffer = attach_buffer(transport["buffer"])
        for number, bucket in enumerate(wanted.buckets):
            filled = [sender.fill_bucket(number) for sender in senders]
            assert sum(answer["bytes"] for answer in filled) == sum(block.nbytes for block in bucket.blocks)
            for block in bucket.blocks:
                expected = held[block.source][block.param][index(block.box)]
                assert torch.equal(block_view(buffer, wanted, number, block), expected.to(getattr(torch, dtype)))
    for sender in senders:
        sender.close_refit()
    with pytest.raises(RefitError, match="owner has exited"):
        attach_buffer(transport["buffer"])


def test_checksums_are_of_the_source_and_name_what_differs() -> None:
    wanted, source = plan(engine=2), Source(0, 1)
    sender = RefitSender(source, 0, run_id="test")
    open_all([sender], wanted)
    sent, held = {}, source.parameters()
    for number in range(len(wanted.buckets)):
        sent |= sender.fill_bucket(number, "full", 1, "bfloat16")["sums"]
    sender.close_refit()
    arrived: dict[str, dict] = {"rank 0": {}, "rank 1": {}}
    for bucket, number in sent:
        one = wanted.buckets[bucket].blocks[number]
        values = held[one.param][index(one.box)]
        for copy, read in enumerate(one.reads):
            arrived[f"rank {read.rank}"][bucket, number, copy] = checksum(values, torch.bfloat16)
    assert len(sent) == len(list(wanted.blocks()))
    assert first_difference(wanted, sent, arrived) is None
    key = next(reversed(arrived["rank 1"]))
    arrived["rank 1"][key] += 1
    message = first_difference(wanted, sent, arrived)
    one = wanted.buckets[key[0]].blocks[key[1]]
    assert message and message.startswith(f"{one.reads[key[2]].param} [")
    assert f"on rank 1 is not what policy rank 0 holds in {one.param}" in message


def test_a_rotating_sample_reaches_every_block() -> None:
    blocks = [(bucket, number) for bucket, one in enumerate(plan().buckets) for number in range(len(one.blocks))]
    times = [sum(is_checked("sample", version, *block) for version in range(5, 21)) for block in blocks]
    assert times == [1] * len(blocks)
    assert all(is_checked("full", 3, *block) and not is_checked("off", 3, *block) for block in blocks)


def test_another_plan_makes_another_buffer() -> None:
    sender = RefitSender(Source(0, 1), 0, run_id="test")
    (first,) = open_all([sender], plan())
    (second,) = open_all([sender], plan(dtype="bfloat16"))
    assert first["transport"] != second["transport"] and first["digest"] != second["digest"]
    with pytest.raises(RefitError, match="owner has exited"):
        attach_buffer(first["transport"]["buffer"])
    sender.close_refit()
    sender.close_refit()


class Wrong:
    def __init__(self, **changes: Tensor | None) -> None:
        self.changes = changes

    def parameters(self) -> dict[str, Tensor]:
        found = Source(0, 1).parameters() | {name.replace("__", "."): new for name, new in self.changes.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Wrong(decoder__final_layernorm__weight=None), "rank 0 holds no 'decoder.final_layernorm.weight', which"),
        (Wrong(decoder__final_layernorm__weight=torch.zeros(31)), r"'decoder.final_layernorm.weight' as \(31,\)"),
        (Wrong(decoder__final_layernorm__weight=torch.zeros(1, 32)), r"as \(1, 32\), the plan needs"),
    ],
)
def test_parameters_that_do_not_fit_the_plan(source: Wrong, message: str) -> None:
    sender = RefitSender(source, 0, run_id="test")
    with pytest.raises(RefitError, match=message):
        open_all([sender], plan())
    sender.close_refit()
    with pytest.raises(RefitError, match="no refit is open on policy rank 0"):
        sender.send_refit()


def test_a_source_may_show_merged_weights() -> None:
    """Base and adapter under the base's names: the plan and the bytes are those of any other weights."""
    base, adapted = Source(0, 1), "decoder.layers.1.mlp.linear_fc2.weight"
    down, up = torch.randn(2, 24), torch.randn(32, 2)

    class Merged:
        def parameters(self) -> dict[str, Tensor]:
            return base.parameters() | {adapted: base.parameters()[adapted] + up @ down}

    wanted, sender = plan(), RefitSender(Merged(), 0, run_id="merged")
    (opened,) = open_all([sender], wanted)
    assert opened["digest"] == plan().digest
    buffer = attach_buffer(opened["transport"]["buffer"])
    for number, bucket in enumerate(wanted.buckets):
        sender.fill_bucket(number)
        for block in bucket.blocks:
            expected = Merged().parameters()[block.param][index(block.box)]
            assert torch.equal(block_view(buffer, wanted, number, block), expected)
            different = not torch.equal(expected, base.parameters()[block.param][index(block.box)])
            assert different == (block.param == adapted)
    sender.close_refit()
