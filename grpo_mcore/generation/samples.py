"""Conversion of our requests to vLLM's, and of vLLM's outputs to trajectories."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from grpo_mcore.rollout.text_tokens import text_of
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, Turn

_Span = tuple[int, int, int]  # weight version, first token, last token + 1


def sampling_params(
    request: GenerationRequest, sampling: Sampling, max_model_len: int, special: Mapping[str, int]
) -> SamplingParams:
    """Return vLLM's parameters. `special`: the tokenizer's special tokens, by their text. Raises ValueError if a prompt
    fills the context or a seed is out of range."""
    where = f"prompt {request.uid!r}, generation {request.generation_index}"
    prompt_length = sum(len(turn) for turn in request.turns)
    room = max_model_len - prompt_length
    if prompt_length < 1 or room < 1:
        raise ValueError(
            f"{where}: {prompt_length} prompt tokens in a context of {max_model_len} (max_model_len); "
            "there must be at least one, and room for one more"
        )
    if not 0 <= request.seed < 2**63:
        raise ValueError(f"{where}: seed {request.seed} is not in 0 .. 2**63 - 1")
    stop = dict.fromkeys((*sampling.stop_strings, *request.stop_strings))
    stop_ids = [*sampling.stop_token_ids, *(special[text] for text in stop if text in special)]
    stop_texts = [text for text in stop if text not in special]  # vLLM looks for them in a text without special tokens
    return SamplingParams(
        max_tokens=min(sampling.max_new_tokens, room),
        temperature=0.0 if sampling.first_is_greedy and request.generation_index == 0 else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        seed=request.seed,
        logprobs=0,  # of the sampled token only
        prompt_logprobs=0 if sampling.scores_prompt else None,
        flat_logprobs=True,  # lists of numbers, in place of a dictionary and an object a token
        stop=stop_texts,
        stop_token_ids=list(dict.fromkeys(stop_ids)),
        include_stop_str_in_output=True,
        # Stop strings are looked for in the text as it grows; without them one decoding at the end is
        # cheaper.
        detokenize=bool(stop_texts),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # nobody else has them; a deep copy is a tenth of the time of adding a request
    )


def to_trajectory(
    request: GenerationRequest, output: RequestOutput, tokenizer: Any, unreadable: Collection[str] = ()
) -> Trajectory:
    """Return all earlier turns and the generated one, with its tokens as sampled, end-of-sequence included. A sample
    with an image of `unreadable` digests counts as aborted."""
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    flat = completion.logprobs
    assert isinstance(flat, FlatLogprobs) and flat.token_ids == token_ids, "one log-prob a token"
    generated = Turn(
        role="assistant",
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        logprobs=torch.tensor(flat.logprobs, dtype=torch.float32),
        loss_mask=True,
        text=text_of(tokenizer, token_ids, completion.text),
    )
    given_up = bool(unreadable) and any(span.digest in unreadable for span in request.image_spans())
    reason: Any = "abort" if given_up else completion.finish_reason
    by_token = reason == "stop" and not isinstance(completion.stop_reason, str)
    before = request.continues.weight_versions if request.continues is not None else ()
    prompt_length = len(output.prompt_token_ids or ())
    routes: Tensor | None = None
    if completion.routed_experts is not None:  # of all tokens but the last, which was sampled but never read
        routes = torch.from_numpy(completion.routed_experts[: prompt_length + len(token_ids) - 1].astype("int16"))
    return Trajectory(
        uid=request.uid,
        generation_index=request.generation_index,
        turns=(*request.turns, generated),
        weight_versions=_spans(before, completion.weight_versions or (), prompt_length),
        finish_reason=reason if reason in ("stop", "length") else "abort",
        truncated=reason == "length",
        stop_token=token_ids[-1] if by_token else None,
        routed_experts=routes,
    )


def prompt_logprobs(output: RequestOutput) -> Tensor:
    """Return the log-probs of the prompt's tokens but the first, float32, of a request with `scores_prompt`."""
    flat, length = output.prompt_logprobs, len(output.prompt_token_ids or ())
    assert isinstance(flat, FlatLogprobs) and len(flat.logprobs) == length - 1, "one log-prob a token after the first"
    return torch.tensor(flat.logprobs, dtype=torch.float32)


def _spans(before: Sequence[_Span], spans: Sequence[Any], prompt_length: int) -> tuple[_Span, ...]:
    """Append vLLM's spans, counted from the first generated token, to those of the earlier turns, `before`. Prompt
    tokens after `before` belong to the version that first read them."""
    joined = list(before)
    start = joined[-1][2] if joined else 0
    for span in spans:
        version, end = int(span.version), span.end + prompt_length
        if joined and joined[-1][0] == version:
            start = joined.pop()[1]
        joined.append((version, start, end))
        start = end
    return tuple(joined)
