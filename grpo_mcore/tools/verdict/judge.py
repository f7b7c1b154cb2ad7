"""Transformers in float64 as the third judge of a disagreement: log-probs of given tokens, as they should be, and as
they would be with one thing changed."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from grpo_mcore.families import Stage, params_of, read_hf_config, shape_of, unquantized_layers
from grpo_mcore.families.images import image_settings, pixels
from grpo_mcore.parallel.probes import fixed_direction
from grpo_mcore.refit.engine_side.fp8 import Format, dequantized, quantized
from grpo_mcore.rollout.trajectory import ImageSpan, Sampling
from grpo_mcore.tools.parity.parity import cut, load_network

Hook = Callable[[nn.Module, Any, Any], Any]
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class JudgedSample:
    """The n tokens of a sample, and their log-probs by the policy and the engine.

    `tokens` [n] is int64, `generated` [n] bool: the tokens that the policy is to be trained on. `policy` and `engine`
    [n] are float32 log-probs, 0 for a token without one, and None if they are not known. `layers` and `engine_layers`
    are the outputs of each layer of the policy and of the engine, by its number from 1, float64 [2, n], see
    parallel/probes.py; they are empty if not known. The engine does not compute the last token. `images`: their places
    and files.
    """

    name: str
    tokens: Tensor
    generated: Tensor
    policy: Tensor | None
    engine: Tensor | None
    images: tuple[tuple[ImageSpan, bytes], ...] = ()
    layers: Mapping[int, Tensor] = field(default_factory=dict)
    engine_layers: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def prompt(self) -> int:
        """Tokens before the first generated one."""
        return int(self.generated.int().argmax())


class Judge:
    """A model in transformers, in float64. Nothing that is asked of it changes it."""

    def __init__(
        self, folder: Path, sampling: Sampling, older: Path | None = None, unquantized: Sequence[str] | None = None
    ) -> None:
        """Load the model. `sampling` has the temperature and the cut of the log-probs; `older` is a folder of the same
        model with older weights; `unquantized` are the patterns of layers that engines with FP8 weights leave out."""
        self.network, self.sampling = load_network(folder), sampling
        self.shape = shape_of(read_hf_config(folder))
        self._older, self._folder = older, folder
        self._unquantized = unquantized_layers(self.shape) if unquantized is None else unquantized

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Parameters by name; of tied ones both names."""
        return {name: tensor.detach() for name, tensor in self.network.named_parameters(remove_duplicate=False)}

    @cached_property
    def older(self) -> dict[str, Tensor]:
        """The older weights that differ, by name; {} if none were given."""
        if self._older is None:
            return {}
        network = load_network(self._older)
        return {
            name: tensor.detach()
            for name, tensor in network.named_parameters(remove_duplicate=False)
            if not tensor.equal(self.weights[name])
        }

    def quantized(self, kind: Format) -> dict[str, Tensor]:
        """Return linear layers and experts with the values that an engine of one rank with FP8 weights computes with,
        by name. vLLM quantises what it fuses, such as query, key and value, together."""
        by_engine: dict[Any, list[str]] = {}
        for param in params_of(self.shape):
            if param.stage is Stage.LAYER:
                key = (param.engine, param.expert) if param.engine else param
                by_engine.setdefault(key, []).extend(tensor.name for tensor in param.hf)
        fused = [*by_engine.values()]
        fused += [[name] for name, tensor in self.weights.items() if tensor.dim() == 3 and ".experts." in name]
        found: dict[str, Tensor] = {}
        for names in fused:
            layers = [name.removesuffix(".weight") for name in names]
            parts = [self.weights[name] for name in names if name in self.weights]
            kept = any(re.match(pattern.removeprefix("re:"), name) for pattern in self._unquantized for name in layers)
            if not parts or kept or parts[0].dim() < 2 or (kind == "mxfp8" and parts[0].size(-1) % 32):
                continue
            values = dequantized(kind, *quantized(kind, torch.cat(parts, -2).bfloat16())).double()
            found |= dict(zip(names, values.split([part.size(-2) for part in parts], -2), strict=True))
        return found

    @cached_property
    def rounded(self) -> dict[torch.dtype, nn.Module]:
        """The model in the number formats that policies and engines compute in."""
        return {dtype: copy.deepcopy(self.network).to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    @torch.no_grad()
    def logits(
        self,
        sample: JudgedSample,
        tensors: Mapping[str, Tensor] = NO_TENSORS,
        *,
        shift: int = 0,
        before: Tensor | None = None,
        prompt_tensors: Mapping[str, Tensor] | None = None,
        hooks: Mapping[str, Hook] = MappingProxyType({}),
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return the logits that predict tokens 1 to n - 1, float64 [n - 1, vocabulary].

        `tensors` replace parameters and buffers of these names, `prompt_tensors` those that compute the keys and values
        of the prompt. `shift` moves the positions from the first generated token on. The sample can see the tokens
        `before` itself. `hooks` change the output of modules whose class or name ends with their key.
        """
        network = self.network if dtype is torch.float64 else self.rounded[dtype]
        tokens, positions = sample.tokens[None], self._positions(sample)
        positions[..., sample.prompt :] += shift
        extra = 0 if before is None else len(before)
        if before is not None:
            if self.shape.vision is not None:  # transformers takes each of that id for an image
                before = before.where(before != self.shape.vision.image_token, 0)
            tokens = torch.cat([before[None], tokens], 1)
            positions = torch.cat([torch.arange(extra).expand(*positions.shape[:-1], -1), positions], -1)
        positions, seen = positions.unsqueeze(-2), partial(self._seen, sample, dtype=dtype)
        how: dict[str, Any] = {"position_ids": positions}
        if (
            extra or shift or sample.images
        ):  # without a mask transformers takes positions for the starts of packed sequences
            how["attention_mask"] = torch.ones_like(tokens)
        run = partial(functional_call, network, tie_weights=False)
        with _hooked(network, hooks):
            if prompt_tensors is None:
                scores = run(dict(tensors), args=(tokens,), kwargs=how | seen(range(tokens.size(1)))).logits[0]
            else:
                first = sample.prompt
                start = run(
                    dict(prompt_tensors),
                    args=(tokens[:, :first],),
                    kwargs={"position_ids": positions[..., :first], "use_cache": True, **seen(range(first))},
                )
                rest = run(
                    dict(tensors),
                    args=(tokens[:, first:],),
                    kwargs={
                        "position_ids": positions[..., first:],
                        "past_key_values": start.past_key_values,
                        **seen(range(first, tokens.size(1))),
                    },
                )
                scores = torch.cat([start.logits[0], rest.logits[0]])
        return scores[extra:-1].double()

    def _positions(self, sample: JudgedSample) -> Tensor:
        """Return the position of each token, int64 [n], or [3, n] with images."""
        if not sample.images:
            return torch.arange(len(sample.tokens))
        kinds, grids = torch.zeros_like(sample.tokens), torch.tensor([span.grid for span, _ in sample.images])
        for span, _ in sample.images:
            kinds[span.offset : span.offset + span.length] = 1
        network: Any = self.network
        found = network.model.get_rope_index(sample.tokens[None], mm_token_type_ids=kinds[None], image_grid_thw=grids)
        return cast(Tensor, found[0])[:, 0]

    def _seen(self, sample: JudgedSample, tokens: range, dtype: torch.dtype) -> dict[str, Any]:
        """Return what the network takes of the images that begin in a range of tokens."""
        files = [file for span, file in sample.images if span.offset in tokens]
        if not files or self.shape.vision is None:
            return {}
        settings = image_settings(self._folder, self.shape.vision)
        patches, grids = zip(*(pixels(file, settings) for file in files), strict=True)
        return {"pixel_values": torch.cat(patches).to(dtype), "image_grid_thw": torch.tensor(grids)}

    def logprobs(self, sample: JudgedSample, **how: Any) -> Tensor:
        """Return the log-prob of each token, float64 [n], 0 for the first. `how` are options of `logits`."""
        return drawn(self.logits(sample, **how), sample.tokens, self.sampling)

    @torch.no_grad()
    def layers(self, sample: JudgedSample, dtype: torch.dtype = torch.float64) -> dict[int, Tensor]:
        """Return what comes out of each layer, by its number from 1, float64 [2, n]: norm, and product with a fixed
        direction. Empty for a model without a list of all its layers."""
        network = self.network if dtype is torch.float64 else self.rounded[dtype]
        layers = next((m for m in network.modules() if is_list_of(m, self.shape.num_layers)), ())
        direction, traces = fixed_direction(self.shape.hidden_size), dict[int, Tensor]()

        def keep(number: int, module: nn.Module, inputs: Any, output: Any) -> None:
            hidden = (output[0] if isinstance(output, tuple) else output)[0].double()
            traces[number] = torch.stack([hidden.norm(dim=1), hidden @ direction])

        with contextlib.ExitStack() as stack:
            for number, layer in enumerate(layers, start=1):
                stack.callback(layer.register_forward_hook(partial(keep, number)).remove)
            network(sample.tokens[None])
        return traces


def is_list_of(module: nn.Module, count: int) -> bool:
    """Return whether a module is the list of a model's `count` layers."""
    return isinstance(module, nn.ModuleList) and len(module) == count


def drawn(logits: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probs [n] of `tokens` [n] under `logits` [n - 1, vocabulary], at a temperature and after a cut,
    which always keeps the token itself. The first is 0."""
    logits, chosen = logits / sampling.temperature, tokens[1:, None]
    if sampling.top_k or sampling.top_p < 1:
        logits = cut(logits, tokens[1:], sampling.top_k, sampling.top_p)
    return torch.cat([torch.zeros(1, dtype=torch.float64), logits.log_softmax(-1).gather(1, chosen).squeeze(1)])


@contextlib.contextmanager
def _hooked(network: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, module in network.named_modules():
            matches = (end for end in hooks if name.endswith(end) or type(module).__name__.endswith(end))
            if (end := next(matches, None)) is not None:
                stack.callback(module.register_forward_hook(hooks[end]).remove)
        yield
