"""Routing replay (R3, arXiv 2510.11370): a token goes to the experts that it went to in the engine, with weights of its
own router, by Megatron-Core's `RouterReplay`."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor, nn


class RoutersOfChunk:
    """The routers of one model chunk, by layer of the whole model."""

    def __init__(self, layers: nn.ModuleList) -> None:
        routers = {layer.layer_number - 1: getattr(layer.mlp, "router", None) for layer in layers}
        self._replays: dict[int, RouterReplay] = {
            index: router.router_replay
            for index, router in routers.items()
            if router is not None and router.router_replay is not None
        }

    def follow(self, routes: Tensor | None) -> None:
        """For the next forward pass and its backward. routes: int16 [tokens of this rank, layers, experts of a token],
        -1 where nobody asks what comes out (padding, the last token of a sequence). None: routers choose themselves."""
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


def forget_routers() -> None:
    """Megatron-Core keeps a list of all that were ever made."""
    RouterReplay.clear_global_router_replay_instances()
