"""Compare losses on a recorded step: do their gradients point the same way, and which tokens do they come from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mcore.driver.record.recorded_samples import recorded_groups
from grpo_mcore.driver.run.setup import make_loss
from grpo_mcore.objective.loss_parts import BOUNDED, INSIDE, SIGNS, STOPPED, LossPart
from grpo_mcore.observe.run_folder import read_token_texts
from grpo_mcore.observe.samples import SAMPLES_FOLDER
from grpo_mcore.recipe import MasterConfig, load_recipe, needs_prev, needs_reference
from grpo_mcore.step.advantages import compute_targets
from grpo_mcore.step.step_batch import build_step_batch
from grpo_mcore.tools.replay.replay import ReplayError, policy_before

OWN = "own"
"""The name of the run's own loss."""
KINDS = ("number", "word", "space", "other", "end of a turn")
"""Kinds of tokens: with a digit; with a letter; of white space; without any of these; those that ended a turn."""
REGIONS = {INSIDE: "passes", BOUNDED: "is bounded", STOPPED: "is stopped"}


@dataclass(frozen=True)
class LossShare:
    """Tokens of a step. `shares`: for each loss, the share of its gradient that comes from them: the inner product with
    the whole gradient over its square; the shares of a group add up to 1. NaN where the whole gradient is 0."""

    group: str
    name: str
    tokens: int
    shares: tuple[float, ...]


@dataclass(frozen=True)
class LossComparison:
    """How alike the gradients of several losses are. `norms`: one for each loss; `cosines`: [losses, losses]; both are
    means over the optimizer steps."""

    names: tuple[str, ...]
    optimizer_steps: int
    norms: tuple[float, ...]
    cosines: Tensor
    parts: list[LossShare] = field(default_factory=list)


def with_loss(config: MasterConfig, words: str, scratch: Path) -> MasterConfig:
    """Return the recipe with another section `loss_fn`. `words`: "own", `key=value,key=value` of the section, or the
    name of a recipe or preset whose section it is. `scratch`: a folder for a file. Raises RecipeError, ReplayError."""
    if words == OWN:
        return config
    if "=" not in words and "," in words:
        separate = " ".join(f"--loss {word}" for word in words.split(","))
        raise ReplayError(f"--loss {words}: name each loss by itself: {separate}")
    file = scratch / "recipe.yaml"
    file.write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
    if "=" in words:
        changes = [f"loss_fn.{word}" for word in words.split(",")]
    else:
        changes = [f"defaults={words if '/' in words or words.endswith('.yaml') else f'presets/{words}'}"]
    loss = load_recipe(file, changes).config.loss_fn
    if loss.use_kl_in_reward != config.loss_fn.use_kl_in_reward:
        raise ReplayError(f"--loss {words}: loss_fn.use_kl_in_reward changes the advantages, not only the loss")
    return MasterConfig.model_validate(config.model_dump(mode="json") | {"loss_fn": loss.model_dump(mode="json")})


def compare_losses(
    configs: Mapping[str, MasterConfig],
    rows: Sequence[Mapping[str, Any]],
    step: int,
    checkpoint: Path | None,
    run: Path,
    scratch: Path,
) -> LossComparison:
    """Compute the gradients of several losses on a recorded step. `configs`: recipes by the loss's name, alike in
    everything else; `rows`: its samples (`recorded_step`). With several optimizer steps each begins with the weights
    that the first loss leaves. Raises ReplayError."""
    config, *_ = configs.values()
    if config.on_policy_distillation.enabled:
        raise ReplayError("--loss: a step with teachers cannot be compared")
    if config.ppo.enabled:
        raise ReplayError("--loss: a step with a critic cannot be compared")
    losses = [make_loss(config) for config in configs.values()]
    names = tuple(configs)
    with policy_before(config, step, checkpoint, scratch) as (cluster, model, policy):
        batch = build_step_batch(
            recorded_groups(rows, cluster.store), config, model.layout, shares_prefixes=policy.shares_prefixes
        )
        if not batch.ranks:
            raise ReplayError(f"step {step} has too few samples that count")
        policy.receive(batch.ranks)
        prev, reference = (any(map(needs, configs.values())) for needs in (needs_prev, needs_reference))
        stats = {}
        if prev or reference:
            kl_kind = config.loss_fn.reference_policy_kl_type if config.loss_fn.use_kl_in_reward else None
            stats = policy.infer_logprobs(
                len(batch.samples), prev=prev, reference=reference, kl_kind=kl_kind, dropout=True
            )
        targets, _ = compute_targets(batch, stats, config)
        labels, parts = _parts(losses, names, config)
        products, tokens = policy.compare_losses(losses, parts, targets, token_kinds(rows, run, model.shape.vocab_size))
    count = len(losses)
    squares = torch.stack([product[:count].diagonal() for product in products])  # [optimizer steps, losses]
    cosines = torch.stack([product[:count] for product in products]) / (squares[:, :, None] * squares[:, None]).sqrt()
    shares = torch.stack([product[count:].reshape(-1, count, count).diagonal(dim1=1, dim2=2) for product in products])
    shares = shares.sum(0) / squares.sum(0)
    return LossComparison(
        names,
        len(products),
        tuple(squares.sqrt().mean(0).tolist()),
        cosines.mean(0),
        [
            LossShare(*label, int(sum(product[number * count] for product in tokens)), tuple(shares[number].tolist()))
            for number, label in enumerate(labels)
        ],
    )


def _parts(
    losses: Sequence[Any], names: Sequence[str], config: MasterConfig
) -> tuple[list[tuple[str, str]], list[Any]]:
    """Return (group, name) of each set of tokens, and for each set the part of each loss."""
    sets: list[tuple[tuple[str, str], dict[str, Any]]] = [
        *((("kind", name), {"by": "token_kinds", "value": number}) for number, name in enumerate(KINDS)),
        *((("advantage", name), {"by": "signs", "value": number}) for number, name in enumerate(SIGNS)),
    ]
    oldest = config.grpo.async_grpo.max_age
    for age in range(oldest + 1) if oldest else ():
        sets.append((("age", str(age)), {"by": "ages", "value": age, "and_above": age == oldest}))
    for name, loss in zip(names, losses, strict=True):
        sets += [
            ((f"where {name}", text), {"by": "regions", "value": region, "of": loss})
            for region, text in REGIONS.items()
        ]
    parts = [LossPart(loss, **which) for _, which in sets for loss in losses]
    return [label for label, _ in sets], parts


def token_kinds(rows: Sequence[Mapping[str, Any]], run: Path, vocabulary: int) -> Tensor:
    """Return the kind of each token, int64 [vocabulary]: its number in KINDS. `run`: whose record has their texts."""
    kinds = torch.full((vocabulary,), KINDS.index("other"))
    for token, text in read_token_texts(run / SAMPLES_FOLDER).items():
        if any(map(str.isdigit, text)):
            kinds[token] = KINDS.index("number")
        elif any(map(str.isalpha, text)):
            kinds[token] = KINDS.index("word")
        elif text.isspace():
            kinds[token] = KINDS.index("space")
    for row in rows:
        if row["stop_token"] is not None:
            kinds[row["stop_token"]] = KINDS.index("end of a turn")
    return kinds


def lines_of(comparison: LossComparison) -> list[str]:
    names, width = comparison.names, max(12, *map(len, comparison.names))
    steps = comparison.optimizer_steps
    lines = [f"{'':24}  {'norm':>{width}}  " + "  ".join(f"{name:>{width}}" for name in names) + "   (cosine)"]
    for number, name in enumerate(names):
        cosines = "  ".join(f"{value:{width}.4f}" for value in comparison.cosines[number].tolist())
        lines.append(f"{name:24}  {comparison.norms[number]:{width}.4g}  {cosines}")
    if steps > 1:
        lines.append(f"means of {steps} optimizer steps, each with the weights that {names[0]} leaves")
    total = sum(part.tokens for part in comparison.parts if part.group == "advantage")
    lines += ["", f"{'share of the gradient':30}  {'of tokens':>{width}}  " + "  ".join(f"{n:>{width}}" for n in names)]
    for part in comparison.parts:
        if part.tokens:
            shares = "  ".join(f"{share:{width}.1%}" for share in part.shares)
            lines.append(f"{part.group + ': ' + part.name:30}  {part.tokens / total:{width}.1%}  {shares}")
    return lines
