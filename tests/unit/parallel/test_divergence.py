"""Divergences and their gradients in chunks and tiles, against formulas over whole rows in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mcore.objective import Divergence
from grpo_mcore.parallel.divergence import divergences

TOKENS, VOCAB, PADDED = 13, 70, 72
KINDS = [
    Divergence("forward"),
    Divergence("reverse"),
    Divergence("mixed", 0.3),
    Divergence("jsd", 0.3),
    Divergence("jsd", 0.0),
    Divergence("jsd", 1.0),
    Divergence("forward", top_k=5),
    Divergence("reverse", top_k=5),
    Divergence("mixed", 0.3, top_k=5),
    Divergence("jsd", 0.3, top_k=5),
    Divergence("forward", top_k=5, zero_outside=True),
    Divergence("reverse", top_k=5, zero_outside=True),
    Divergence("mixed", 0.3, top_k=5, zero_outside=True),
    Divergence("jsd", 0.3, top_k=5, zero_outside=True),
    Divergence("mixed", 0.5, top_k=1000),
]


def name_of(divergence: Divergence) -> str:
    return "-".join(str(value) for value in divergence)


def inputs(scale: float = 3.0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    sizes = {
        "hidden": (TOKENS, 8), "weight": (PADDED, 8), "teacher_hidden": (TOKENS, 12), "teacher_weight": (PADDED, 12),
    }  # fmt: skip
    found = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
    found["hidden"] *= scale / 3
    found["teacher_hidden"] *= scale / 4
    return found | {"targets": torch.randint(0, VOCAB, (TOKENS,), generator=draw)}


def by_formula(it: dict[str, Tensor], divergence: Divergence, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of the targets, the divergence of each token, and those of the teacher, in float64."""
    zs = (it["hidden"].double() @ it["weight"].double().t())[:, :VOCAB] / temperature
    zt = (it["teacher_hidden"].double() @ it["teacher_weight"].double().t())[:, :VOCAB] / temperature
    logprobs = [z.log_softmax(-1).gather(1, it["targets"][:, None])[:, 0] for z in (zs, zt)]
    p_log, q_log, q = zs.log_softmax(-1), zt.log_softmax(-1), zt.softmax(-1)
    if divergence.top_k is not None and divergence.top_k < VOCAB:
        top, at = zt.topk(divergence.top_k, -1)
        q_log, q = top.log_softmax(-1), top.softmax(-1)
        if divergence.zero_outside:
            q_log = torch.full_like(zs, -100.0).scatter(1, at, q_log)
            q = torch.zeros_like(zs).scatter(1, at, q)
        else:
            p_log = zs.gather(1, at).log_softmax(-1)
    p, beta = p_log.exp(), divergence.weight
    forward = torch.where(q > 0, q * (q_log - p_log), 0.0).sum(-1)
    reverse = (p * (p_log - q_log)).sum(-1)
    if divergence.kind == "mixed":
        values = beta * forward + (1 - beta) * reverse
    elif divergence.kind == "jsd" and 0 < beta < 1:
        m = (beta * q_log.exp() + (1 - beta) * p).log()
        values = beta * torch.where(q > 0, q * (q_log - m), 0.0).sum(-1) + (1 - beta) * (p * (p_log - m)).sum(-1)
    else:
        values = reverse if divergence.kind == "reverse" or (divergence.kind == "jsd" and beta == 1) else forward
    return logprobs[0], values, logprobs[1]


def computed(it: dict[str, Tensor], divergence: Divergence, **settings: Any) -> Tensor:
    how = {"temperature": 1.0, "chunk": 4, "tile": 16, "group": None, "vocab_start": 0, "vocab_size": VOCAB} | settings
    return divergences(**it, divergence=divergence, **how)


@pytest.mark.parametrize("divergence", KINDS, ids=name_of)
@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 3.0), (0.7, 12.0)])
def test_values_and_gradients_are_those_of_whole_rows(divergence: Divergence, temperature: float, scale: float) -> None:
    it = inputs(scale)
    exact = {
        name: value.double().requires_grad_() if value.is_floating_point() else value for name, value in it.items()
    }
    expected = by_formula(exact, divergence, temperature)
    wanted = torch.autograd.grad(1.7 * expected[1].sum(), [exact["hidden"], exact["weight"]])
    mine = {name: value.clone().requires_grad_() if value.is_floating_point() else value for name, value in it.items()}
    found = computed(mine, divergence, temperature=temperature)
    assert found.dtype == torch.float32
    for row, values in zip(found, expected, strict=True):
        assert torch.allclose(row.double(), values, rtol=1e-6, atol=5e-6 * scale / 3)
    gradients = torch.autograd.grad(1.7 * found[1].sum(), [mine["hidden"], mine["weight"]])
    for gradient, value in zip(gradients, wanted, strict=True):
        assert (gradient - value).norm() <= 1e-5 * scale * value.norm() + 2e-5, "logits are in float32"
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(computed(mine, divergence)[1].sum(), [mine["teacher_hidden"]])


@pytest.mark.parametrize("divergence", KINDS, ids=name_of)
def test_equal_models_differ_by_exactly_nothing(divergence: Divergence) -> None:
    it = inputs()
    it |= {"teacher_hidden": it["hidden"].clone(), "teacher_weight": it["weight"].clone()}
    it["hidden"].requires_grad_()
    it["weight"].requires_grad_()
    found = computed(it, divergence)
    gradients = torch.autograd.grad(found[1].sum(), [it["hidden"], it["weight"]])
    if divergence.zero_outside:
        assert (found[1] > 0).all(), "all of the policy against k tokens of itself"
    else:
        assert not found[1].any() and not any(gradient.any() for gradient in gradients)
    assert found[0].equal(found[2])


def test_neither_chunks_nor_tiles_change_a_value() -> None:
    it = inputs()
    for divergence in KINDS:
        whole = computed(it, divergence, chunk=100, tile=100)
        for chunk, tile in ((1, 7), (5, 70), (13, 16)):
            assert torch.allclose(computed(it, divergence, chunk=chunk, tile=tile), whole, atol=1e-5)


def test_models_that_never_agree_stay_finite() -> None:
    it = inputs(300.0)
    it["hidden"].requires_grad_()
    for divergence in KINDS:
        found = computed(it, divergence)
        (gradient,) = torch.autograd.grad(found[1].sum(), [it["hidden"]])
        assert found.isfinite().all() and gradient.isfinite().all()
        if divergence.kind == "jsd" and 0 < divergence.weight < 1:
            limit = -(0.3 * torch.tensor(0.3).log() + 0.7 * torch.tensor(0.7).log())
            assert (found[1] <= limit + 1e-5).all()


def test_no_tokens_and_a_short_teacher() -> None:
    it = inputs()
    none = {name: value[:0] if name.endswith("hidden") or name == "targets" else value for name, value in it.items()}
    assert computed(none, Divergence()).shape == (3, 0)
    with pytest.raises(ValueError, match="the teacher's output layer has 69 rows here, the policy's 70"):
        computed(it | {"teacher_weight": it["teacher_weight"][:69]}, Divergence())


def test_tokens_of_different_weight_are_refused() -> None:
    """The gradient is computed before the weights are known."""
    it = inputs()
    it["hidden"].requires_grad_()
    found = computed(it, Divergence())
    with pytest.raises(RuntimeError, match="the tokens of a divergence must have one weight in the loss"):
        torch.autograd.grad((found[1] * torch.arange(TOKENS)).sum(), [it["hidden"]])
    with torch.no_grad():
        assert computed(it, Divergence()).equal(found)


TRL = {  # (beta, temperature): loss, norms of the gradients of hidden states and output layer, one value of each
    (0.0, 1.0): (4.15020847, 0.604515197, 0.534793645, 0.0754602402, -0.000326016569),
    (1.0, 1.0): (5.08867168, 0.728788845, 0.739879552, 0.0137687409, 0.00739018945),
    (0.3, 1.0): (0.456587791, 0.0319502275, 0.0269407629, 0.00259233895, 0.000122861777),
    (0.3, 0.7): (0.536195338, 0.032308773, 0.025152967, 0.00158043636, 0.000160944226),
}  # fmt: skip
"""What `trl.trainer.distillation_trainer._chunked_divergence_loss` of TRL 1.16.0, the loss of its DistillationTrainer,
returns for `inputs()` without the padded rows, all tokens counting: with hidden[None], teacher_hidden[None], the two
output layers, a mask of ones [1, TOKENS] and beta; gradients by torch.autograd.grad, values at [3, 2] and [20, 5]."""


@pytest.mark.parametrize(("beta", "temperature"), TRL)
def test_the_loss_is_that_of_trl(beta: float, temperature: float) -> None:
    """Its definition is that of `jsd`, which at 0 and 1 is the forward and the reverse KL."""
    it = inputs()
    it["hidden"].requires_grad_()
    it["weight"].requires_grad_()
    loss = computed(it, Divergence("jsd", beta), temperature=temperature)[1].mean()
    hidden, weight = torch.autograd.grad(loss, [it["hidden"], it["weight"]])
    found = (loss.item(), hidden.double().norm().item(), weight.double().norm().item(), hidden[3, 2], weight[20, 5])
    assert found[0] == pytest.approx(TRL[beta, temperature][0], abs=1e-6, rel=1e-6)
    for mine, theirs in zip(found[1:], TRL[beta, temperature][1:], strict=True):
        assert float(mine) == pytest.approx(theirs, rel=1e-4, abs=1e-8)


def test_equal_models_are_equal_in_products_of_any_size() -> None:
    """Many tokens and words: a product of another shape would round differently."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 64, generator=draw), torch.randn(5000, 64, generator=draw)
    it = {"hidden": hidden, "weight": weight, "teacher_hidden": hidden.clone(), "teacher_weight": weight.clone()}
    it |= {"targets": torch.zeros(300, dtype=torch.int64)}
    it["hidden"].requires_grad_()
    found = computed(it, Divergence("reverse"), chunk=256, tile=2048, vocab_size=5000)
    (gradient,) = torch.autograd.grad(found[1].sum(), [it["hidden"]])
    assert not found[1].any() and not gradient.any()
