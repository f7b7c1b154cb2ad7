"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from grpo_mcore.families import parameter_count
from grpo_mcore.tools.plan.run_plan import Plan, ranks_of
from grpo_mcore.tools.plan.search import EQUAL, SearchResult
from grpo_mcore.tools.plan.workload import Device

if TYPE_CHECKING:  # it imports torch
    from grpo_mcore.tools.plan.trace import TracedPhase


def plan_text(plan: Plan) -> str:
    """Return the whole plan, a few dozen lines."""
    load, device = plan.load, plan.device
    room = "the host's memory" if device.memory is None else f"{device.memory / 1e9:.0f} GB"
    lines = [
        f"model       {plan.model}: {load.shape.family}, {parameter_count(load.shape) / 1e9:.3g} B parameters",
        f"batch       {plan.batch}",
        f"layout      {load.layout.describe()} = {load.world} ranks, {load.nodes} x {load.gpus_per_node} {device.name} "
        f"({room})",
        f"            {load.micro_batches} micro-batches a rank and optimizer step, if samples have "
        f"{load.mean_length:,} tokens; pipeline bubble {plan.times.bubble:.0%}",
    ]
    if load.sharing > 1:
        lines.append(
            f"            {load.computed:.0%} of their tokens are computed, if prompts have {load.prompt:,}: once for "
            f"{load.sharing} samples"
        )
    if load.grpo:
        lines.append(
            f"engines     {load.engines} x {load.engine_layout.describe()}; {_size(plan.engine.kv_cache)} of KV cache "
            f"a rank hold {plan.engine.sequences(load.max_length):,} samples of {load.max_length:,} tokens; at most "
            f"{load.max_sequences:,} at a time"
        )
    if load.critic is not None:
        billions = parameter_count(load.critic.shape) / 1e9
        lines.append(f"critic      {load.critic.shape.family}, {billions:.3g} B parameters, on the policy's ranks")
    for teacher in load.teachers:
        shape, its = teacher.load.shape, teacher.load.layout
        sent = "hidden states" if teacher.distributions else "log-probs"
        lines.append(
            f"teacher     {teacher.alias}: {shape.family}, {parameter_count(shape) / 1e9:.3g} B parameters, "
            f"{its.describe()}, sends {sent}"
            + (f", {its.data} vLLM engines" if teacher.engines else "")
            + (f", has {teacher.load.nodes} x {teacher.load.gpus_per_node} devices to itself" if teacher.apart else "")
        )
    lines += ["", *_memory(plan), "", *_time(plan)]
    if plan.refit is not None:
        written = plan.refit.written
        lines += [
            "",
            f"refit       {_size(plan.refit.tensor_bytes)} in {plan.refit.buckets} buckets through a buffer of "
            f"{_size(plan.refit.buffer)}, over {plan.refit.link}",
            f"            written by a policy rank: {_size(min(written))} to {_size(max(written))}; read by an engine "
            f"rank: {_size(plan.refit.read)}"
            + (f"; to each other node: {_size(plan.refit.to_other_nodes)}" if plan.refit.to_other_nodes else ""),
        ]
        if plan.refit.adapters is not None:
            kind = "adapters" if load.refit_adapters else "merged"
            lines.append(
                f"            merged weights: {_size(plan.refit.merged)}; adapters alone: {_size(plan.refit.adapters)} "
                f"(policy.megatron_cfg.peft.refit: {kind})"
            )
    lines += ["", f"bottleneck  {plan.bottleneck}"]
    compared = "" if device.memory is not None else "; the host's memory is not compared with"
    lines.append(f"verdict     {'it fits' if plan.fits else 'IT DOES NOT FIT'}{compared}")
    if not plan.fits:
        lines.append(f"            `grpo-mcore plan RECIPE --search {load.nodes}` lists layouts that fit as many nodes")
    lines += [f"warning     {warning}" for warning in plan.warnings]
    for suggestion in plan.suggestions:
        lines += wrap(suggestion, 116, initial_indent="faster      ", subsequent_indent=" " * 12)
    return "\n".join(lines)


def trace_text(traced: Sequence[TracedPhase], device: Device) -> str:
    """Return what the traced ranks did, beside the plan."""
    lines = [
        "traced      one rank at full size ran its log-probs and training step on tensors without values, with the",
        "            kernels that torch has for GPUs; TransformerEngine's are not traced. Launches, syncs and bytes",
        "            sent are per micro-batch in log-probs and training, per step in the others.",
    ]
    for stage in dict.fromkeys(phase.stage for phase in traced):
        lines += ["", f"  stage {stage:<18}{'peak, GB':>12}{'planned, GB':>14}{'launches':>12}{'syncs':>8}   sent"]
        for phase in (phase for phase in traced if phase.stage == stage):
            sent = ", ".join(
                f"{_size(nbytes)} {name.strip('_')}" for name, nbytes in phase.sent.items() if nbytes > 1e6
            )
            lines.append(
                f"    {phase.name:<20}{_gb(phase.peak_bytes):>12}{_gb(phase.planned_bytes):>14}{phase.launches:>12,}"
                f"{phase.syncs:>8,}   {sent}"
            )
    for phase in traced:
        if phase.name == "training" and phase.places:
            places = ", ".join(f"{position} {count:g}" for position, count in phase.places.items())
            lines += ["", *wrap(f"stage {phase.stage} synchronises in {places}", 116, subsequent_indent="  ")]
    over = [phase for phase in traced if device.memory is not None and phase.peak_bytes > device.memory]
    lines += ["", f"verdict     {'IT DOES NOT FIT: ' + ', '.join(phase.name for phase in over) if over else 'it fits'}"]
    return "\n".join(lines)


def search_text(result: SearchResult, nodes: int) -> str:
    """Return the candidates, fastest first, each with its overrides; or what helps where nothing fits."""
    candidates = result.candidates
    if not candidates:
        lines = [f"no layout fits {nodes} node{'s' * (nodes != 1)}"]
        if result.refused is not None:
            lines += wrap(f"many are refused, most for this: {result.refused}", 116)
        lines += wrap(
            "what helps: more nodes, a device with more memory, a smaller policy.sequence_packing.train_mb_tokens, or "
            "a policy.train_global_batch_size with more divisors",
            116,
        )
        return "\n".join(lines)
    lines = [f"layouts that fit {nodes} node{'s' * (nodes != 1)}, fastest first by this estimate"]
    for number, candidate in enumerate(candidates, 1):
        slower = candidate.seconds / candidates[0].seconds
        pace = (
            ""
            if number == 1
            else f", {slower - 1:.0%} slower" + ": no difference that the estimate can tell" * (slower <= EQUAL)
        )
        mark = f" (the recipe's{pace})" if candidate.own else ""
        mark += f" (not on --resume from {candidate.refused_by})" if candidate.refused_by else ""
        lines += [
            f"{number}. {candidate.layout}{mark}",
            f"   {candidate.reason}",
            f"   {' '.join(candidate.overrides)}",
        ]
    return "\n".join(lines)


def _memory(plan: Plan) -> list[str]:
    """Return one table for each kind of stage: the first, those between, the last."""
    count, lines = len(plan.stages), ["memory of a rank, GB"]
    shown = sorted({0, min(1, count - 1), count - 1})
    for index in shown:
        stage = plan.stages[index]
        upto = index if index in (0, count - 1) else count - 2
        stages = f"stage {index}" if upto == index else f"stages {index} to {upto}, most"
        ranks = ranks_of(plan.load, index)
        layers = plan.load.layers[index]
        lines.append(
            f"  {stages}: ranks {ranks.start} to {ranks_of(plan.load, upto).stop - 1}, {len(layers)} layers a stage, "
            f"{plan.load.params(index).numel / 1e6:,.1f} M parameters a rank"
        )
        rows = [("", *(phase.name for phase in stage.phases))]
        for part in dict.fromkeys(name for phase in stage.phases for name in phase.parts):
            rows.append((part, *(_gb(phase.parts.get(part)) for phase in stage.phases)))
        rows.append(("total", *(_gb(phase.total) for phase in stage.phases)))
        lines += [f"    {row[0]:36}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows]
        if stage.host.parts:
            parts = "; ".join(f"{part} {_gb(size)}" for part, size in stage.host.parts.items())
            lines.append(f"    on the host: {parts}")
    if plan.node_memory:
        has = plan.device.host_memory
        of = "" if has is None else f" of {has / 1e9:,.0f}"
        lines.append(
            f"  host memory of a node: {plan.node_memory / 1e9:,.0f}{of} GB, with the refit buffer and processes"
        )
    return lines


def _time(plan: Plan) -> Iterable[str]:
    yield f"a step           {'PFLOPs':>12}{'floor, s':>12}{'likely, s':>12}   goes into"
    for phase in plan.times.phases:
        flops = f"{phase.flops / 1e15:.4g}" if phase.flops else ""
        yield f"  {phase.name:15}{flops:>12}{phase.floor:>12.4g}{phase.likely:>12.4g}   {phase.bound}"
    yield f"  {'total':15}{'':>12}{'':>12}{plan.times.likely:>12.4g}"


def _gb(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e9:.2f}" if nbytes >= 1e7 or nbytes == 0 else f"{nbytes / 1e9:.5f}"


def _size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
