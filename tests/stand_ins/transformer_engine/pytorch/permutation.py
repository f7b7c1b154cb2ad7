"""The experts' permutations of tokens, of dense routing maps only."""

import torch

from transformer_engine.pytorch.kernels import on_cpu


@on_cpu
def moe_permute(
    inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of inp [T, H] by expert, and the row of each token at each expert [T, experts], -1: none."""
    assert map_type == "mask" and len(inp) == len(routing_map)
    if not inp.numel():
        return inp.clone(), torch.empty(0, routing_map.size(1), dtype=torch.int32)
    assert num_out_tokens > 0, f"moe_permute (mask map) requires num_out_tokens > 0, got {num_out_tokens}"
    chosen = routing_map.bool().T
    rows = torch.where(chosen, (chosen.flatten().cumsum(0) - 1).view_as(chosen), -1).T
    tokens = torch.arange(len(inp)).expand_as(chosen).masked_select(chosen)
    assert len(tokens) == num_out_tokens
    return inp.index_select(0, tokens), rows


@on_cpu
def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output, rows = moe_permute(inp, routing_map, num_out_tokens)
    return output, probs.T.masked_select(routing_map.bool().T), rows


@on_cpu
def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
) -> torch.Tensor:
    """Return the sum of each token's rows, times their probabilities [T, experts] if there are any: [T, H]."""
    assert map_type == "mask" and restore_shape is not None
    token, expert = (row_id_map >= 0).nonzero(as_tuple=True)
    values = inp.index_select(0, row_id_map[token, expert].long()).float()
    if merging_probs is not None:
        values = values * merging_probs[token, expert, None].float()
    return values.new_zeros(restore_shape).index_add(0, token, values).to(inp.dtype)


@on_cpu
def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


@on_cpu
def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(moe_sort_chunks_by_index(part, split_sizes, sorted_index) for part in (inp, probs))
