from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from grpo_mcore.families import Box, params_of, shape_of
from grpo_mcore.refit.buffer import attach_buffer, slot_view
from grpo_mcore.refit.plan import RefitError, RefitPlan, plan_refit
from grpo_mcore.refit.sender import RefitSender
from tests.unit.refit.shards import ShardedModel

SHAPE = shape_of({
    "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 24, "vocab_size": 29, "tie_word_embeddings": False,
})  # fmt: skip
TENSORS = [tensor for param in params_of(SHAPE) if not param.copy for tensor in param.hf]
BUFFER_BYTES = 4 * 29 * 32 * 4


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in TENSORS}


class Source:
    """A source whose weights change between refits."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.weights = random_weights(0)

    def pieces(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        return ShardedModel(self.weights, SHAPE, self.rank, self.size).pieces()


def plan(dtype: str = "float32") -> RefitPlan:
    return plan_refit(TENSORS, dtype=dtype, buffer_bytes=BUFFER_BYTES)


def assert_buffer_holds(weights: dict[str, torch.Tensor], plan: RefitPlan, bucket: int, transport: dict) -> None:
    buffer = attach_buffer(transport)
    for slot in plan.buckets[bucket].slots:
        expected = weights[slot.name].to(getattr(torch, slot.dtype))
        assert torch.equal(slot_view(buffer, plan, bucket, slot), expected), slot.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_write_whole_tensors_bit_for_bit(size: int, dtype: str) -> None:
    wanted = plan(dtype)
    assert len(wanted.buckets) >= 3, "halves are used again"
    sources = [Source(rank, size) for rank in range(size)]
    senders = [RefitSender(source, run_id="test") for source in sources]
    transport = None
    for seed in (1, 2):
        for source in sources:
            source.weights = random_weights(seed)
        opened = [senders[0].open_refit(None, wanted.to_json())]
        assert transport in (None, opened[0]["transport"]), "the buffer stays mapped"
        transport = opened[0]["transport"]
        opened += [sender.open_refit(transport, wanted.to_json()) for sender in senders[1:]]
        assert {answer["digest"] for answer in opened} == {wanted.digest}
        for bucket in range(len(wanted.buckets)):
            filled = [sender.fill_bucket(bucket) for sender in senders]
            expected = sum(slot.nbytes for slot in wanted.buckets[bucket].slots)
            assert sum(answer["bytes"] for answer in filled) == expected
            assert_buffer_holds(random_weights(seed), wanted, bucket, transport)
    for sender in senders:
        sender.close_refit()
    with pytest.raises(RefitError, match="owner has ended"):
        attach_buffer(transport)


def test_another_plan_makes_another_buffer() -> None:
    sender = RefitSender(Source(0, 1), run_id="test")
    first = sender.open_refit(None, plan().to_json())
    second = sender.open_refit(None, plan("bfloat16").to_json())
    assert first["transport"] != second["transport"] and first["digest"] != second["digest"]
    with pytest.raises(RefitError, match="owner has ended"):
        attach_buffer(first["transport"])
    sender.close_refit()
    sender.close_refit()


def test_a_rank_without_weights_takes_part() -> None:
    """A data-parallel replica."""
    owner = RefitSender(Source(0, 1), run_id="test")
    opened = owner.open_refit(None, plan().to_json())
    replica = RefitSender(Empty())
    assert replica.open_refit(opened["transport"], plan().to_json())["held"] == []
    assert replica.fill_bucket(0)["bytes"] == 0
    with pytest.raises(RefitError, match="holds no weights"):
        RefitSender(Empty()).open_refit(None, plan().to_json())
    replica.close_refit()
    owner.close_refit()


class Empty:
    def pieces(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        return iter(())


class Wrong:
    def __init__(self, name: str, box: Box, values: torch.Tensor) -> None:
        self.piece = (name, box, values)

    def pieces(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        return iter([self.piece])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Wrong("model.extra.weight", ((0, 1),), torch.zeros(1)), "'model.extra.weight', which the refit"),
        (Wrong("model.norm.weight", ((0, 32),), torch.zeros(31)), r"'model.norm.weight' .* shape \(31,\)"),
    ],
)
def test_pieces_that_do_not_fit_the_plan(source: Wrong, message: str) -> None:
    sender = RefitSender(source, run_id="test")
    with pytest.raises(RefitError, match=message):
        sender.open_refit(None, plan().to_json())
    sender.close_refit()


def test_a_failing_copy_names_bucket_and_tensor() -> None:
    # A box beyond the tensor: the driver's coverage check refuses it; here the copy itself does.
    sender = RefitSender(Wrong("model.norm.weight", ((30, 40),), torch.zeros(10)), run_id="test")
    sender.open_refit(None, plan().to_json())
    bucket = plan().slots["model.norm.weight"][0]
    with pytest.raises(RefitError, match=f"bucket {bucket} with 'model.norm.weight'"):
        sender.fill_bucket(bucket)
    sender.close_refit()
    with pytest.raises(RefitError, match="no refit is open"):
        sender.fill_bucket(0)
