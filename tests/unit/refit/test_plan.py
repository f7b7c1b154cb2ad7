from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mcore.refit.plan import GIB, RefitError, RefitPlan, plan_refit


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]


def tensors(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [Tensor(f"t{number}", shape) for number, shape in enumerate(shapes)]


shape = st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple)
shapes = st.lists(shape, min_size=1, max_size=40)


@given(shapes, st.sampled_from(["float32", "bfloat16"]), st.integers(0, 100_000), st.sampled_from([1, 64, 512]))
def test_every_tensor_once_in_order_aligned_and_apart(
    sizes: list[tuple[int, ...]], dtype: str, extra: int, alignment: int
) -> None:
    given_ = tensors(sizes)
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    largest = max(math.prod(size) for size in sizes) * itemsize
    buffer = 2 * (math.ceil(largest / alignment) * alignment) + extra
    plan = plan_refit(given_, dtype=dtype, buffer_bytes=buffer, alignment=alignment)

    slots = [slot for bucket in plan.buckets for slot in bucket.slots]
    assert [(slot.name, slot.shape) for slot in slots] == [(tensor.name, tensor.shape) for tensor in given_]
    assert plan.buffer_bytes <= buffer
    for bucket in plan.buckets:
        assert bucket.slots and bucket.nbytes <= plan.half_bytes
        end = 0
        for slot in bucket.slots:
            assert slot.offset >= end and slot.offset % alignment == 0
            assert slot.nbytes == math.prod(slot.shape) * itemsize
            end = slot.offset + slot.nbytes
        assert end <= bucket.nbytes
    assert plan.tensor_bytes == sum(slot.nbytes for slot in slots)


def test_neighbouring_buckets_lie_in_different_halves() -> None:
    plan = plan_refit(tensors([(100,)] * 6), dtype="float32", buffer_bytes=2 * 1024, alignment=512)
    assert len(plan.buckets) == 3 and plan.half_bytes == 1024
    assert [plan.start(number) for number in range(3)] == [0, 1024, 0]
    assert plan.buffer_bytes == 2048


def test_one_bucket_takes_one_half_of_its_own_size() -> None:
    plan = plan_refit(tensors([(100,)]), dtype="float32", buffer_bytes=GIB)
    assert plan.buffer_bytes == 512


def test_json_gives_back_the_same_plan_and_digest() -> None:
    plan = plan_refit(tensors([(3, 5), (), (7,)]), dtype="bfloat16", buffer_bytes=4096)
    again = RefitPlan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest and again.to_json() == plan.to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [(3, 5), (7,), (2,)]},
        {"sizes": [(5, 3), (7,)]},
        {"dtype": "float32"},
        {"buffer_bytes": 1024},
        {"alignment": 64},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_digest_shows_every_difference(change: dict) -> None:
    base = {"sizes": [(3, 5), (7,)], "dtype": "bfloat16", "buffer_bytes": 8192, "alignment": 512}

    def digest(sizes: list[tuple[int, ...]], **how: object) -> str:
        return plan_refit(tensors(sizes), **how).digest  # type: ignore[arg-type]

    assert digest(**base) != digest(**(base | change))  # type: ignore[arg-type]


def test_too_large_a_tensor_is_named_with_a_size_that_works() -> None:
    wanted = [Tensor("model.norm.weight", (64,)), Tensor("model.embed_tokens.weight", (151_936, 2048))]
    with pytest.raises(RefitError, match=r"'model.embed_tokens.weight' of 622,329,856 bytes") as caught:
        plan_refit(wanted, dtype="bfloat16", buffer_bytes=GIB // 2)
    found = re.search(r"refit_buffer_size_gb that holds it is ([\d.]+)", str(caught.value))
    assert found
    gib = float(found[1])
    assert plan_refit(wanted, dtype="bfloat16", buffer_bytes=int(gib * GIB))
    with pytest.raises(RefitError):
        plan_refit(wanted, dtype="bfloat16", buffer_bytes=int((gib - 0.0002) * GIB))


def test_what_cannot_be_planned() -> None:
    with pytest.raises(RefitError, match="'t' is given twice"):
        plan_refit([Tensor("t", (1,)), Tensor("t", (1,))], dtype="float32", buffer_bytes=GIB)
    with pytest.raises(RefitError, match="no tensors"):
        plan_refit([], dtype="float32", buffer_bytes=GIB)
    with pytest.raises(RefitError, match="'int7'"):
        plan_refit([Tensor("t", (1,))], dtype="int7", buffer_bytes=GIB)


def test_rooms_load_without_vllm_and_megatron() -> None:
    code = (
        "import sys, grpo_mcore.refit, grpo_mcore.generation\n"
        "print([name for name in ('vllm', 'megatron', 'ray') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
