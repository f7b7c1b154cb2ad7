"""Routing replay (R3, arXiv 2510.11370) by Megatron-Core's `RouterReplay`: each token goes to the experts that
the engine chose for it, weighted by the policy's own router."""

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor, nn


class RoutersOfChunk:
    """The routers of one model chunk, keyed by layer index in the whole model."""

    def __init__(self, layers: nn.ModuleList) -> None:
        routers = {layer.layer_number - 1: getattr(layer.mlp, "router", None) for layer in layers}
        self._replays: dict[int, RouterReplay] = {
            index: router.router_replay
            for index, router in routers.items()
            if router is not None and router.router_replay is not None
        }

    def replay(self, routes: Tensor | None) -> None:
        """Set the experts of the next forward and backward pass; None lets the routers choose.

        routes: int16 [tokens of this rank, layers, experts per token], -1 where the output is not used (padding, the
        last token of a sequence).
        """
        for layer, replay in self._replays.items():
            replay.clear_indices()
            if routes is None:
                replay.clear_router_replay_action()
                continue
            chosen = routes[:, layer].long()
            replay.set_target_indices(
                torch.where(chosen < 0, torch.arange(chosen.size(1), device=chosen.device), chosen)
            )
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def clear_routers() -> None:
    """Empty Megatron-Core's global list of all routers that were ever created."""
    RouterReplay.clear_global_router_replay_instances()
