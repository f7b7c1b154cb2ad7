"""`eval`: what `grpo-mcore eval` measures, on the data of data.validation. `rehearse`: what `grpo-mcore rehearse`
assumes of the run; no other command reads it."""

from typing import Any, Literal

from pydantic import Field

from grpo_mcore.recipe.schema.section import (
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Probability,
    Section,
    Seed,
)


class EvalConfig(Section):
    """`eval`. A recipe of NeMo RL's form has `generation` (with model_name), `tokenizer` and `data.dataset_name` beside
    it, which are read as policy.generation with its val_ keys, policy and data.validation."""

    metric: Literal["pass@k", "cons@k"] = "pass@k"
    """Score of a task in the table. pass@k: at least one of k samples is correct. cons@k: the answer that most of k
    samples give is correct. Both are always reported."""
    k_value: Positive = 1
    """Number k of the metric: at most the samples of a prompt."""
    num_tests_per_prompt: Positive = 1
    """Number of samples of one prompt with one seed."""
    seed: Seed = 42
    """Seed of sampling, together with prompt and generation index."""
    num_seeds: Positive = 1
    """Number of repetitions of all samples, with the seeds seed, seed + 1, ..."""
    num_prompts: Positive | None = None
    """Maximum number of prompts, the first of the data, one of each dataset in turn. null: all."""
    save_path: str = "results/eval"
    """Folder of samples and report, relative to the working directory. Samples of the same settings that it already
    holds are kept, so that an interrupted evaluation continues."""
    sets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Keys of a dataset by its name (split, env_name, prompt_file, ...), for names that data.dataset_name gives."""

    @property
    def samples_per_prompt(self) -> int:
        """Number of samples of one prompt, over all seeds."""
        return self.num_tests_per_prompt * self.num_seeds


class RehearseConfig(Section):
    """`rehearse`: what `grpo-mcore rehearse` assumes of samples, rewards and devices."""

    device: str | None = None
    """The accelerator, as in `grpo-mcore plan --device`. null: H100, or cpu where cluster.platform is cpu."""
    mean_tokens: Positive | None = None
    """Mean tokens of prompt and answer. null: half of policy.max_total_sequence_length."""
    spread: NonNegativeFloat = 0.7
    """Spread of the answers' lengths: the standard deviation of their logarithm. 0: all are equally long. Answers that
    would exceed the context are truncated."""
    prompt_spread: NonNegativeFloat = 0.4
    """Share of `spread` that lies between prompts; the rest lies between the samples of one prompt."""
    solve_rate: Probability = 0.5
    """Mean reward over the prompts; each has a rate of its own."""
    turns: PositiveFloat = 1.0
    """Mean number of turns of a sample, at most grpo.max_rollout_turns."""
    turn_tokens: Positive = 64
    """Tokens of an environment's message."""
    reward_seconds: NonNegativeFloat = 0.05
    """Median seconds that an environment needs for a sample's turn."""
    reward_spread: NonNegativeFloat = 0.5
    """Standard deviation of the logarithm of these seconds."""
    reward_failures: Probability = 0.0
    """Share of the turns for which the environment finds no reward."""
    save_seconds: NonNegativeFloat | None = None
    """Seconds in which the ranks write a checkpoint. null: at 1 GB/s for each node."""
    start_seconds: NonNegativeFloat = 120.0
    """Seconds that policy and engines need to start."""
    seed: Seed = 0
    """Seed of all draws."""
