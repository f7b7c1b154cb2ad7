"""Axes against transformers' positions; places of features by brute force; rows that are joined."""

import random

import pytest
import torch

from grpo_mcore.batching.packed_batch import join_rows, pack_rows, share_prefixes
from grpo_mcore.batching.row_images import row_images, token_axes
from grpo_mcore.rollout.trajectory import ImageSpan


def sample(draw: random.Random, most_images: int = 3) -> tuple[int, list[ImageSpan]]:
    """Return tokens of a sample, and its images: of 4 contents, each always of one grid."""
    spans, end = [], 0
    for _ in range(draw.randint(0, most_images)):
        content = draw.randint(0, 3)
        rows, columns = ((2, 3), (3, 2), (1, 4), (2, 2))[content]
        offset = end + draw.randint(1, 4)
        spans.append(ImageSpan(offset, rows * columns, f"image {content}", (1, 2 * rows, 2 * columns)))
        end = offset + rows * columns
    return end + draw.randint(1, 5), spans


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen2_5_VL", "Qwen3_5"])
def test_axes_are_transformers_positions(family: str) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")()
    get_rope_index = getattr(transformers, f"{family}Model").get_rope_index
    holder = type("Holder", (), {"config": config})()
    holder.get_vision_position_ids = getattr(transformers, f"{family}Model").get_vision_position_ids.__get__(holder)
    draw = random.Random(1)
    for _ in range(20):
        length, spans = sample(draw)
        kinds = torch.zeros(1, length, dtype=torch.int64)
        for span in spans:
            kinds[0, span.offset : span.offset + span.length] = 1
        grids = torch.tensor([span.grid for span in spans]) if spans else None
        expected, _ = get_rope_index(holder, kinds, kinds, grids)
        assert torch.equal(token_axes(length, spans, 2), expected[:, 0])


def test_an_image_with_another_number_of_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"an image of grid \(1, 4, 6\) has 5 tokens, not 6"):
        token_axes(9, [ImageSpan(1, 5, "x", (1, 4, 6))], 2)


def test_rows_know_each_image_once_and_join_to_the_row_of_all() -> None:
    draw = random.Random(2)
    for _ in range(20):
        bins = [[sample(draw) for _ in range(draw.randint(1, 3))] for _ in range(3)]

        def packed(samples: list[tuple[int, list[ImageSpan]]]):
            ids = [torch.full((length,), 6) for length, _ in samples]
            columns = [{"token_mask": torch.ones(length), "sample_mask": torch.tensor(1.0)} for length, _ in samples]
            images = row_images([length for length, _ in samples], [spans for _, spans in samples], 2)
            return pack_rows(ids, columns, 8, images=images)

        everything = [sample for bin in bins for sample in bin]
        whole, joined = packed(everything), join_rows([packed(bin) for bin in bins], 8)
        if whole.images is None:
            assert joined.images is None
            continue
        assert joined.images is not None
        assert torch.equal(joined.images.axes, whole.images.axes)
        assert len({digest for digest, _ in whole.images.images}) == len(whole.images.images)
        for row in (whole, joined):
            assert row.images.axes.shape == (3, row.tokens.size(1))
            sides = {digest: list(range(size)) for digest, size in row.images.images}
            names = [(digest, k) for digest in sides for k in sides[digest]]
            expected, start = [None] * row.tokens.size(1), 0
            for length, spans in everything:
                for span in spans:
                    for k in range(span.length):
                        expected[start + span.offset + k] = (span.digest, k)
                start += length
            assert [None if place < 0 else names[place] for place in row.images.feature.tolist()] == expected


def test_prefixes_are_shared_by_content() -> None:
    """Four samples of equal ids: two show one image, one another, one has none, but ids that a policy sampled."""
    shown = [[ImageSpan(2, 4, name, (1, 4, 4))] for name in ("cat", "cat", "dog")] + [[]]
    ids = torch.tensor([1, 4, 6, 6, 6, 6, 5, 2, 9, 9])
    columns = [{"token_mask": torch.ones(10), "sample_mask": torch.tensor(1.0)}] * 4
    row = share_prefixes(pack_rows([ids] * 4, columns, images=row_images([10] * 4, shown, 2)), block=2)
    assert row.shared is not None and row.shared.new_tokens == (10, 0, 8, 8)
