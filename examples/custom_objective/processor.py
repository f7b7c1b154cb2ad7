"""A data processor of your own: it makes a row of a dataset the prompt that engine and environment get."""

from __future__ import annotations

from typing import Any

from grpo_mcore.data.interfaces import TaskDataSpec
from grpo_mcore.data.processors import math_hf_data_processor
from grpo_mcore.rollout.datum import DatumSpec


def padded_sums(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int | None, idx: int
) -> DatumSpec:
    """Process a sum, and write its answer with three digits: 82 is 082. The rest is the built-in processor's work."""
    datum = math_hf_data_processor(datum_dict, task_data_spec, tokenizer, max_seq_length, idx)
    fields = datum["extra_env_info"]
    fields["padded"] = f"{int(fields['ground_truth']):03d}"  # for a reward function
    return datum
