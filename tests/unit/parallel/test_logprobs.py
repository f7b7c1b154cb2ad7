"""Chunked token log-probs and entropies against float64 log-softmax over the whole vocabulary."""

from typing import Any

import pytest
import torch

from grpo_mcore.parallel.logprobs import Cut, token_scores

WHOLE = {"group": None, "vocab_start": 0, "vocab_size": 40, "temperature": 1.0, "chunk": 8, "tile": 2048}


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(40, 16, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, 37, (23,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def equals_formula(cut: Cut | None, loose: float, entropy: bool, **how: Any) -> torch.Tensor:
    """Values and gradients against those of the definition, whose first 37 rows are no padding. Returns the weights'
    gradient."""
    hidden, weight, targets = case(torch.float32)
    words = WHOLE | {"vocab_size": 37} | how
    found = token_scores(hidden, weight, targets, **words, entropy=entropy, **({"cut": cut} if cut else {}))
    upstream = torch.linspace(-1, 2, 23 * (1 + entropy)).view(1 + entropy, 23)
    (found * upstream).sum().backward()

    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    logits = (exact_hidden @ exact_weight.t() / words["temperature"])[:, :37]
    kept = torch.full_like(logits, cut is None, dtype=torch.bool)
    for row, ranked in enumerate(logits.detach().argsort(-1, descending=True).tolist() if cut else ()):
        ranked = ranked[: cut.top_k]  # one token after the other, as the definition says
        mass = logits.detach()[row, ranked].softmax(0)
        enough = next(n for n in range(1, len(ranked) + 1) if n == len(ranked) or mass[:n].sum() >= cut.top_p)
        kept[row, ranked[:enough]] = True
        kept[row, targets[row]] = True
    every = torch.log_softmax(logits.masked_fill(~kept, -1e300), -1)
    rows = [every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every * kept).sum(-1)]
    expected = torch.stack(rows[: 1 + entropy])
    (expected * upstream).sum().backward()

    torch.testing.assert_close(found, expected.float(), atol=2e-6 * loose, rtol=3e-7 * loose)
    torch.testing.assert_close(hidden.grad, exact_hidden.grad.float(), atol=1e-5 * loose, rtol=0)
    torch.testing.assert_close(weight.grad, exact_weight.grad.float(), atol=1e-5 * loose, rtol=0)
    return weight.grad


@pytest.mark.parametrize("tile", [1, 16, 2048])
@pytest.mark.parametrize("chunk", [1, 7, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_equal_log_softmax(tile: int, chunk: int, temperature: float, entropy: bool) -> None:
    gradient = equals_formula(None, 1.0, entropy, temperature=temperature, chunk=chunk, tile=tile)
    assert (gradient[37:] == 0).all()


@pytest.mark.parametrize("cut", [Cut(5), Cut(1), Cut(None, 0.6), Cut(9, 0.8), Cut(None, 1e-6), Cut(100, 0.99)], ids=str)
@pytest.mark.parametrize("tile", [16, 2048])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_cut_distribution_equals_its_formula(cut: Cut, tile: int, entropy: bool) -> None:
    equals_formula(cut, 2.0, entropy, temperature=0.7, tile=tile)


def test_bfloat16_keeps_its_dtype_and_float32_results() -> None:
    hidden, weight, targets = case(torch.bfloat16)
    found = token_scores(hidden, weight, targets, **WHOLE)
    found.sum().backward()
    assert found.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    expected = torch.log_softmax(hidden.double() @ weight.double().t(), -1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(found[0].double(), expected, atol=0.06, rtol=0)


def test_without_tokens() -> None:
    hidden, weight, _ = case(torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    found = token_scores(hidden[:0], weight, none, **WHOLE)
    found.sum().backward()
    assert found.shape == (1, 0) and (weight.grad == 0).all()
