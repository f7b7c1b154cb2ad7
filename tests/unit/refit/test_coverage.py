from __future__ import annotations

import pytest

from grpo_mcore.families import HfTensor, params_of, shape_of
from grpo_mcore.refit.coverage import check_coverage
from grpo_mcore.refit.plan import RefitError, plan_refit
from tests.unit.refit.shards import ShardedModel

PLAN = plan_refit([HfTensor("a", (4, 6)), HfTensor("b", (3,))], dtype="float32", buffer_bytes=1 << 20)
A_TOP, A_BOTTOM, B = ("a", ((0, 2), (0, 6))), ("a", ((2, 4), (0, 6))), ("b", ((0, 3),))


def test_shards_and_replicas_cover() -> None:
    check_coverage(PLAN, {"policy-0": [A_TOP, B], "policy-1": [A_BOTTOM, B], "policy-2": []})


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"p0": [A_TOP, B]}, r"hold 12 of the 24 elements of 'a'"),
        ({"p0": [A_TOP, A_BOTTOM]}, r"hold 0 of the 3 elements of 'b' \(boxes: none\)"),
        ({"p0": [A_TOP, B], "p1": [("a", ((1, 4), (0, 6)))]}, r"p0 and p1 hold overlapping parts of 'a'"),
        # Twice the upper half is as many elements as the whole.
        ({"p0": [A_TOP, B], "p1": [("a", ((0, 2), (0, 5))), ("a", ((2, 4), (5, 6)))]}, r"overlapping parts"),
        ({"p0": [A_TOP, A_BOTTOM, B], "p1": [("c", ((0, 1),))]}, r"p1 holds 'c', which"),
        ({"p0": [A_TOP, ("a", ((2, 5), (0, 6))), B]}, r"p0 holds \(\(2, 5\), \(0, 6\)\) of 'a', outside"),
        ({"p0": [A_TOP, A_BOTTOM, ("b", ((0, 3), (0, 1)))]}, r"of 'b', outside its shape \(3,\)"),
    ],
)
def test_what_does_not_cover(held: dict, message: str) -> None:
    with pytest.raises(RefitError, match=message):
        check_coverage(PLAN, held)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensor_parallel_ranks_of_a_family_cover_its_checkpoint(size: int, tied: bool) -> None:
    import torch

    config = {
        "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 24, "vocab_size": 29,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    shape = shape_of(config)
    tensors = [tensor for param in params_of(shape) if not param.copy for tensor in param.hf]
    whole = {tensor.name: torch.zeros(tensor.shape) for tensor in tensors}
    plan = plan_refit(tensors, dtype="float32", buffer_bytes=1 << 20)
    held = {
        f"policy-{rank}": [(name, box) for name, box, _ in ShardedModel(whole, shape, rank, size).pieces()]
        for rank in range(size)
    }
    check_coverage(plan, held)
    held["policy-0"].pop()
    with pytest.raises(RefitError):
        check_coverage(plan, held)
