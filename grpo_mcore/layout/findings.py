"""A problem with values of a recipe, before it is tied to a file and a line, and the error that carries it."""

from dataclasses import dataclass


class Key:
    """The keys of a recipe that layouts come from."""

    TENSOR = "policy.megatron_cfg.tensor_model_parallel_size"
    PIPELINE = "policy.megatron_cfg.pipeline_model_parallel_size"
    CONTEXT = "policy.megatron_cfg.context_parallel_size"
    VIRTUAL = "policy.megatron_cfg.virtual_pipeline_model_parallel_size"
    EXPERT = "policy.megatron_cfg.expert_model_parallel_size"
    EXPERT_TENSOR = "policy.megatron_cfg.expert_tensor_parallel_size"
    FIRST = "policy.megatron_cfg.num_layers_in_first_pipeline_stage"
    LAST = "policy.megatron_cfg.num_layers_in_last_pipeline_stage"
    SEQUENCE = "policy.megatron_cfg.sequence_parallel"
    ENGINE_TENSOR = "policy.generation.vllm_cfg.tensor_parallel_size"
    ENGINE_PIPELINE = "policy.generation.vllm_cfg.pipeline_parallel_size"
    ENGINE_EXPERT = "policy.generation.vllm_cfg.expert_parallel_size"


@dataclass(frozen=True)
class Finding:
    """Values of `keys` (full keys, the one to change first) that are wrong together, not yet tied to a place."""

    keys: tuple[str, ...]
    message: str


class LayoutError(ValueError):
    """A layout that fits neither the ranks nor the model. `args`: the findings, each with its key and message."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__(*findings)

    def __str__(self) -> str:
        return "\n".join(f"{finding.keys[0]}: {finding.message}" for finding in self.args)
