"""Rotary angles by position give the very numbers of Megatron-Core's own way, sequence by sequence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform

prepare_megatron(Platform.detect())

from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding  # noqa: E402
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb  # noqa: E402

from grpo_mcore.batching.packed_batch import pack_rows  # noqa: E402
from grpo_mcore.parallel.layers.attention import RotaryByPosition  # noqa: E402
from grpo_mcore.parallel.layers.context import share_of_row, take  # noqa: E402
from grpo_mcore.parallel.layers.packed_row import ImagesHere, PackedRow, describe_row  # noqa: E402

LENGTHS = [3, 9, 1, 30]


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def tables() -> dict[str, tuple[torch.nn.Module, bool]]:
    """Return each kind of embedding, and whether it is latent attention's."""
    cpu: dict[str, Any] = {"use_cpu_initialization": True, "cp_group": group(0, 1)}
    return {
        "plain": (RotaryEmbedding(8, 1.0, **cpu), False),
        "a part of the head": (RotaryEmbedding(8, 0.5, **cpu), False),
        "Llama 3's scaling": (RotaryEmbedding(8, 1.0, rope_scaling=True, **cpu), False),
        "latent": (RotaryEmbedding(8, 1.0, **cpu), True),
        "YaRN": (YarnRotaryEmbedding(8, scaling_factor=40.0, original_max_position_embeddings=16, **cpu), True),
    }


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", list(tables()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_megatrons_rotation_of_every_sequence(kind: str, size: int, dtype: torch.dtype) -> None:
    table, latent = tables()[kind]
    config: Any = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=latent)
    packed = pack_rows([torch.zeros(n, dtype=torch.int64) for n in LENGTHS], [{}] * len(LENGTHS), multiple=4)
    values = torch.randn(packed.tokens.size(1) + 1, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    for rank in range(size):
        ranks = group(rank, size)
        share = share_of_row(packed.cu_seqlens, rank, size)
        positions = take(packed.positions[None], share.index)[0]
        row = describe_row(packed.cu_seqlens, Platform("gpu"), share, ranks, positions=positions)
        assert row.cu_seqlens_q is None and row.cu_seqlens_q_padded is None, "Megatron-Core would wait for the host"
        by_position = RotaryByPosition(table)
        found = by_position(by_position.get_rotary_seq_len(None, None, values, config, row), packed_seq=True)
        angles, scale = found if kind == "YaRN" else (found, 1.0)
        part = values[share.index]
        rotated = apply_rotary_pos_emb(part, angles, config, cu_seqlens=None, mscale=scale, cp_group=ranks)

        old = table(row.max_seqlen_q, packed_seq=True)
        old = old[0] if kind == "YaRN" else old
        expected = apply_rotary_pos_emb(part, old, config, cu_seqlens=row.ends, mscale=scale, cp_group=ranks)
        real = share.index < packed.tokens.size(1)
        assert real.sum() >= 20 and torch.equal(rotated[real], expected[real])
        assert not torch.equal(rotated[real], part[real])


def test_a_table_serves_rows_of_many_lengths() -> None:
    """Megatron-Core keeps 32 tables: one for each length would cost a GPU memory that no plan knows."""
    table, asked = tables()["plain"][0], []
    by_position = RotaryByPosition(lambda length, packed_seq: asked.append(length) or table(length, packed_seq=True))
    for length in range(1, 200):
        ends, positions = torch.tensor([0, length], dtype=torch.int32), torch.arange(length)
        row = describe_row(ends, Platform("gpu"), positions=positions)
        assert torch.equal(by_position(row), table.get_emb(length)[:, 0])
    assert len(set(asked)) == 9


@pytest.mark.parametrize("interleaved", [False, True])
def test_axes_turn_their_own_sections(interleaved: bool) -> None:
    sections = (4, 2, 2)
    vision: Any = SimpleNamespace(rotary_sections=sections, rotary_interleaved=interleaved)
    by_position = RotaryByPosition(RotaryEmbedding(16, 1.0, use_cpu_initialization=True, cp_group=group(0, 1)), vision)
    axes = torch.tensor([[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]])
    row = PackedRow(qkv_format="thd", max_seqlen_q=7, positions=torch.arange(7))
    plain = by_position(row)
    row.images = ImagesHere(axes, torch.full((7,), -1), None)
    found = by_position(row)
    axis_of = [0] * 4 + [1] * 2 + [2] * 2
    if interleaved:
        axis_of = [next((a for a in (1, 2) if i % 3 == a and i < 3 * sections[a]), 0) for i in range(8)]
    angles = [[float(axes[axis_of[i % 8], t]) * 10000 ** (-(i % 8) / 8) for i in range(16)] for t in range(7)]
    torch.testing.assert_close(found[:, 0].double(), torch.tensor(angles, dtype=torch.float64), atol=1e-6, rtol=1e-6)
    assert torch.equal(found[:2], plain[:2]), "text is turned as without axes"
