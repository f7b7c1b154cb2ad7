from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_mcore.families import params_of, shape_of
from grpo_mcore.refit.buffer import attach_buffer, block_view
from grpo_mcore.refit.layout import EngineLayout, TrainerLayout
from grpo_mcore.refit.plan import RefitError, RefitPlan, plan_refit
from grpo_mcore.refit.proof import checked_parameters, checksum, first_difference
from grpo_mcore.refit.sender import RefitSender
from tests.unit.refit.shards import ShardedModel, index

SHAPE = shape_of({
    "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 24, "vocab_size": 29, "tie_word_embeddings": False,
})  # fmt: skip
TENSORS = [tensor for param in params_of(SHAPE) if not param.copy for tensor in param.hf]


def random_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in TENSORS}


class Source:
    """A source whose weights change between refits."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.weights = random_weights(0)

    def parameters(self) -> dict[str, Tensor]:
        return ShardedModel(self.weights, SHAPE, self.rank, self.size).parameters()


def plan(size: int = 1, dtype: str = "float32", engine: int = 1) -> RefitPlan:
    return plan_refit(
        params_of(SHAPE), SHAPE, TrainerLayout(size), EngineLayout(engine), dtype=dtype, buffer_bytes=8192
    )


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
        opened = [senders[0].open_refit(None, wanted.to_json())]
        assert transport in (None, opened[0]["transport"]), "the buffer stays mapped"
        transport = opened[0]["transport"]
        opened += [sender.open_refit(transport, wanted.to_json()) for sender in senders[1:]]
        assert {answer["digest"] for answer in opened} == {wanted.digest}
        assert sum(answer["bytes"] for answer in opened) == wanted.block_bytes
        buffer = attach_buffer(transport)
        for number, bucket in enumerate(wanted.buckets):
            filled = [sender.fill_bucket(number) for sender in senders]
            assert sum(answer["bytes"] for answer in filled) == sum(block.nbytes for block in bucket.blocks)
            for block in bucket.blocks:
                expected = sources[block.source].parameters()[block.param][index(block.box)]
                assert torch.equal(block_view(buffer, wanted, number, block), expected.to(getattr(torch, dtype)))
    for sender in senders:
        sender.close_refit()
    with pytest.raises(RefitError, match="owner has exited"):
        attach_buffer(transport)


def test_checksums_are_of_the_source_and_name_what_differs() -> None:
    wanted, source = plan(engine=2), Source(0, 1)
    sender = RefitSender(source, 0, run_id="test")
    sender.open_refit(None, wanted.to_json())
    sent = {}
    for number in range(len(wanted.buckets)):
        sent |= sender.fill_bucket(number, "full", 1, "bfloat16")["sums"]
    sender.close_refit()
    found: dict[str, dict] = {"rank 0": {}, "rank 1": {}}
    for (bucket, block, copy), _ in sent.items():
        one = wanted.buckets[bucket].blocks[block]
        values = source.parameters()[one.param][index(one.box)]
        found[f"rank {one.reads[copy].rank}"][bucket, block, copy] = checksum(values, torch.bfloat16)
    assert len(sent) == sum(len(block.reads) for block in wanted.blocks())
    assert first_difference(wanted, sent, found) is None
    key = next(reversed(found["rank 1"]))
    found["rank 1"][key] += 1
    message = first_difference(wanted, sent, found)
    one = wanted.buckets[key[0]].blocks[key[1]]
    assert message and message.startswith(f"{one.reads[key[2]].param} [")
    assert f"on rank 1 is not what policy rank 0 holds in {one.param}" in message


def test_a_rotating_sample_reaches_every_parameter() -> None:
    wanted = plan()
    names = {read.param for block in wanted.blocks() for read in block.reads}
    samples = [checked_parameters(wanted, "sample", version) for version in range(16)]
    assert set().union(*samples) == names and sum(map(len, samples)) == len(names)
    assert checked_parameters(wanted, "full", 3) == names and not checked_parameters(wanted, "off", 3)


def test_another_plan_makes_another_buffer() -> None:
    sender = RefitSender(Source(0, 1), 0, run_id="test")
    first = sender.open_refit(None, plan().to_json())
    second = sender.open_refit(None, plan(dtype="bfloat16").to_json())
    assert first["transport"] != second["transport"] and first["digest"] != second["digest"]
    with pytest.raises(RefitError, match="owner has exited"):
        attach_buffer(first["transport"])
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
        sender.open_refit(None, plan().to_json())
    sender.close_refit()
    with pytest.raises(RefitError, match="no refit is open on policy rank 0"):
        sender.fill_bucket(0)


def test_a_source_may_show_merged_weights() -> None:
    """Base and adapter under the base's names: the plan and the bytes are those of any other weights."""
    base, adapted = Source(0, 1), "decoder.layers.1.mlp.linear_fc2.weight"
    down, up = torch.randn(2, 24), torch.randn(32, 2)

    class Merged:
        def parameters(self) -> dict[str, Tensor]:
            return base.parameters() | {adapted: base.parameters()[adapted] + up @ down}

    wanted, sender = plan(), RefitSender(Merged(), 0, run_id="merged")
    opened = sender.open_refit(None, wanted.to_json())
    assert opened["digest"] == plan().digest
    buffer = attach_buffer(opened["transport"])
    for number, bucket in enumerate(wanted.buckets):
        sender.fill_bucket(number)
        for block in bucket.blocks:
            expected = Merged().parameters()[block.param][index(block.box)]
            assert torch.equal(block_view(buffer, wanted, number, block), expected)
            different = not torch.equal(expected, base.parameters()[block.param][index(block.box)])
            assert different == (block.param == adapted)
    sender.close_refit()
