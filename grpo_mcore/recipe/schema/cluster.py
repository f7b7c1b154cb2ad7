"""`cluster`: nodes, deadlines and environment variables of the workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_mcore.recipe.schema.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class ClusterConfig(Section):
    """`cluster`."""

    backend: Literal["ray", "local"] = "ray"
    """ray: workers are Ray actors. local: everything runs in this process, with one rank, for a debugger."""
    platform: Literal["auto", "cpu", "gpu"] = "auto"
    """Device of policy and engines. auto: GPUs if there are any."""
    num_nodes: Positive = 1
    """Number of nodes."""
    gpus_per_node: Positive = 1
    """GPUs of each node, one policy rank each. On CPU: policy processes of each node."""
    segment_size: Positive | None = None
    """No effect, accepted for recipes of NeMo RL: nodes are chosen without regard to NVLink domains."""
    start_timeout_s: PositiveFloat = 1800.0
    """Seconds within which all workers and engines must have started. The first start on a GPU machine compiles and
    captures the engines' kernels: many minutes for a large model, unless their caches are kept (docs/gpu.md)."""
    step_timeout_s: PositiveFloat = 3600.0
    """Maximum seconds of one phase of a step (generation, log-probs, training, refit, ...)."""
    max_engine_restarts: NonNegative = 3
    """Maximum number of engine deaths in a row without a finished group between them. Each engine is restarted and its
    prompts are generated again."""
    max_restarts: NonNegative = 0
    """Maximum number of restarts in a row without a new checkpoint between them: a run that loses a policy rank, Ray or
    the driver resumes from its newest checkpoint. Only with backend: ray."""
    retry_wait_s: NonNegativeFloat = 1.0
    """Seconds before the first retry after such a loss. Each further retry in a row waits twice as long, at most a
    minute."""
    env_vars: list[str] = Field(default_factory=list)
    """Names of environment variables that are copied to the workers, besides those that they need. No others are
    copied."""
