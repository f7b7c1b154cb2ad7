"""`cluster`: machines, deadlines and what passes to the workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_mcore.recipe.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class ClusterConfig(Section):
    """`cluster`. Read by cluster/."""

    backend: Literal["ray", "local"] = "ray"
    """ray: workers are Ray actors. local: all in this process, with one rank, for a debugger."""
    platform: Literal["auto", "cpu", "gpu"] = "auto"
    """Where policy and engines run. auto: on GPUs where there are any."""
    num_nodes: Positive = 1
    """Nodes."""
    gpus_per_node: Positive = 1
    """Policy ranks of each node: its GPUs; on CPU its policy processes."""
    segment_size: Positive | None = None
    """Nodes of one NVLink domain. Not supported yet."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds until all workers and engines must have started."""
    step_timeout_s: PositiveFloat = 3600.0
    """Seconds that one phase of a step (generation, log-probs, training, refit, ...) may take."""
    max_engine_restarts: NonNegative = 3
    """Engines that may die in a row, without a finished group between them: each is started anew, and its prompts are
    generated anew. Read by algorithms/."""
    max_restarts: NonNegative = 0
    """How often in a row, without a new checkpoint between, a run goes on by itself from its newest checkpoint after
    the loss of a policy rank, of Ray or of the driver. With backend: ray. Read by cli/."""
    retry_wait_s: NonNegativeFloat = 1.0
    """Seconds before the first retry of what such a loss has ended; each further one in a row waits twice as long, at
    most a minute. Read by algorithms/ and cli/."""
    env_vars: list[str] = Field(default_factory=list)
    """Names of environment variables that are copied to the workers, besides those they need; no others
    are."""
