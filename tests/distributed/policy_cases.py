"""The layouts on which the policy is compared with transformers, and what its other tests train on."""

from collections.abc import Sequence
from typing import Any

from grpo_mcore.batching.packed_batch import PackedBatch
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.tools.parity.rank import LayoutCase, ParityWorkload, logprobs_and_gradients, micro_batches

FEW = ParityWorkload(lengths=(5, 17, 9, 12), bins=((0, 1, 2), (3,)), prompts=(1,) * 4)
"""Four sequences in two rows. Each row costs a pass through all layers, so tests that need no more rows have these."""
COUNTS = {"global_valid_seqs": len(FEW.lengths), "global_valid_toks": FEW.trained}

LAYOUTS = (
    LayoutCase("TP1"),
    LayoutCase("TP1-recompute", recompute=True),
    LayoutCase("TP1-parts", recompute=True, recompute_modules=("mlp", "core_attn")),
    LayoutCase("TP2", tensor=2),
    LayoutCase("TP2-SP", tensor=2, sequence_parallel=True),
    LayoutCase("PP2", pipeline=2),
    LayoutCase("DP2", data=2),
    LayoutCase("TP2xPP2", tensor=2, pipeline=2),
    LayoutCase("PP2xDP2", pipeline=2, data=2),
    LayoutCase("CP2", context=2),
    LayoutCase("CP2-recompute", context=2, recompute=True),
    LayoutCase("TP2-SPxCP2", tensor=2, context=2, sequence_parallel=True),
    LayoutCase("PP2xCP2", pipeline=2, context=2),
    LayoutCase("CP2xDP2", context=2, data=2),
    LayoutCase("VPP2", pipeline=2, virtual=2),
    LayoutCase("VPP2xDP2", pipeline=2, virtual=2, data=2),
    LayoutCase("PP2-uneven", pipeline=2, first_stage=1),
)

MOE_LAYOUTS = (
    LayoutCase("TP1"),
    LayoutCase("EP2-parts", data=2, expert=2, recompute=True, recompute_modules=("moe", "mlp", "core_attn")),
    LayoutCase("TP2-SP", tensor=2, sequence_parallel=True),
    LayoutCase("PP2", pipeline=2),
    LayoutCase("VPP2", pipeline=2, virtual=2),
    LayoutCase("CP2", context=2),
    LayoutCase("EP2", data=2, expert=2),
    LayoutCase("EP2-allgather", data=2, expert=2, dispatcher="allgather"),
    LayoutCase("ETP2", tensor=2, sequence_parallel=True, expert_tensor=2),
    LayoutCase("EP2xTP2-SP", tensor=2, data=2, sequence_parallel=True, expert=2),
    LayoutCase("EP2xETP2-allgather", tensor=2, data=2, sequence_parallel=True, expert=2, expert_tensor=2,
               dispatcher="allgather"),
    LayoutCase("EP2xCP2xDP2", context=2, data=2, expert=2),
    LayoutCase("EP2xPP2", pipeline=2, data=2, expert=2),
    LayoutCase("TP2-SPxPP2-EP2", tensor=2, pipeline=2, sequence_parallel=True, expert=2),
)  # fmt: skip


def few_rows(policy: Policy) -> list[PackedBatch]:
    """Return this data-parallel rank's rows of FEW, or of its sequences one by one where there are four such ranks."""
    return micro_batches(policy, packed=policy.layout.data < len(FEW.lengths), work=FEW)


def in_bins(address: Address, model: str, case: LayoutCase, bins: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compute log-probs and gradients of these bins; bin i belongs to data-parallel rank i modulo their number."""
    return logprobs_and_gradients(address, model, case, work=ParityWorkload(bins=tuple(map(tuple, bins))))
