"""`eval`: what `grpo-mcore eval` measures. The data is that of data.validation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from grpo_mcore.recipe.schema.section import NonNegative, Positive, Section


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
    seed: NonNegative = 42
    """Seed of sampling, together with prompt and generation index."""
    num_seeds: Positive = 1
    """Number of repetitions of all samples, with the seeds seed, seed + 1, ..."""
    num_prompts: Positive | None = None
    """Maximum number of prompts, the first of the data, one of each dataset in turn. null: all."""
    save_path: str = "results/eval"
    """Folder of samples and report, relative to the working directory. Samples of the same settings that it already
    holds are kept, so that an interrupted evaluation goes on."""
    sets: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Keys of a dataset by its name (split, env_name, prompt_file, ...), for names that data.dataset_name gives."""

    @property
    def samples_per_prompt(self) -> int:
        """Number of samples of one prompt, over all seeds."""
        return self.num_tests_per_prompt * self.num_seeds
