"""A GRPO loop of your own: one `Policy`, one `Engine`, a refit between them, in one process and without Ray.

    python examples/custom_loop/custom_loop.py

A small random Qwen3 learns to say even digits: the reward of a sample is the share of its tokens that are even digits.
It takes about a minute on a CPU, and the mean reward rises from about 0.1 to above 0.9.

What it is: the parts of `grpo_mcore` without the trainer around them, as a place to start for an algorithm that
`algorithms/grpo.py` does not have. Every part is the real one: a Megatron-Core policy, a vLLM engine, the planned and
verified refit, the clipped loss.
What it is not: there is no schedule, data loader, environment, checkpoint or fault handling, and one rank of each. More
ranks need a `Policy` in every process (torchrun, or the cluster room) and the batches of each data-parallel rank.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from grpo_mcore.base.processes import free_port
from grpo_mcore.batching.packed_batch import PackedBatch, pack_rows
from grpo_mcore.cluster.local_cluster import LocalWorker
from grpo_mcore.data.tokenizer import load_tokenizer
from grpo_mcore.generation import Engine, EngineConfig
from grpo_mcore.layout import EngineLayout, PolicyLayout
from grpo_mcore.objective import ClippedPGLossFn, group_index, grpo_advantages, valid_counts
from grpo_mcore.parallel.mesh import Address
from grpo_mcore.parallel.policy import Policy
from grpo_mcore.recipe import load_recipe
from grpo_mcore.refit.plan.plan import plan_model_refit
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.refit.refit import refit
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, Turn
from grpo_mcore.tools.demo.arithmetic import make_base_config, make_tokenizer

PROMPTS, GENERATIONS = 8, 16  # groups a step, samples a group
SAMPLING = Sampling(max_new_tokens=8, temperature=1.0)


def reward(trajectory: Trajectory) -> float:
    """Share of the generated characters that are even digits; an empty answer scores 0."""
    text = trajectory.generated_text
    return sum(character in "02468" for character in text) / SAMPLING.max_new_tokens


def make_requests(tokenizer: Any, step: int) -> list[GenerationRequest]:
    """Ask for GENERATIONS samples of each prompt, each with a seed of its own."""
    requests = []
    for prompt in range(PROMPTS):
        tokens = torch.tensor(tokenizer.encode(f"<bos><user>{prompt}<assistant>", add_special_tokens=False))
        for index in range(GENERATIONS):
            seed = (step * PROMPTS + prompt) * GENERATIONS + index
            requests.append(GenerationRequest(f"prompt-{prompt}", index, (Turn("user", tokens),), seed))
    return requests


def pack(trajectories: list[Trajectory], rewards: list[float], multiple: int) -> PackedBatch:
    """Put all samples side by side in one row, each with the advantage over its group."""
    groups = group_index([trajectory.uid for trajectory in trajectories])
    advantages = grpo_advantages(torch.tensor(rewards, dtype=torch.float64), groups).advantages
    columns = [
        {
            "token_mask": trajectory.loss_mask().float(),
            "sample_mask": torch.tensor(1.0),
            "generation_logprobs": trajectory.logprobs(),
            "advantages": advantage,
        }
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
    ]
    return pack_rows([trajectory.token_ids() for trajectory in trajectories], columns, multiple)


def main(steps: int = 30) -> list[float]:
    """Train for `steps` steps and return the mean reward of each."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        make_tokenizer(Path(folder) / "tokenizer")
        make_base_config(model, Path(folder) / "tokenizer", hidden_size=64, intermediate_size=128, num_layers=2)
        return train(model, steps)


def train(model: str, steps: int) -> list[float]:
    """Train the Hugging Face model in the folder `model`. This is the loop."""
    overrides = [
        f"policy.model_name={model}",
        "policy.megatron_cfg.tensor_model_parallel_size=1",
        "cluster.gpus_per_node=1",
        "policy.megatron_cfg.optimizer.lr=2e-3",
    ]
    config = load_recipe("grpo-arithmetic-cpu", overrides).config
    address = Address(rank=0, world_size=1, local_rank=0, master_addr="127.0.0.1", master_port=free_port())
    policy = Policy(config.policy, address, seed=0, timeout_s=60, reference=False)
    engine = Engine(EngineConfig(model, dtype="float32", max_model_len=32, load_format="dummy", kv_cache_memory_gb=0.1))
    sender = RefitSender(policy.weights, rank=0)
    plan = plan_model_refit(policy.shape, PolicyLayout(), EngineLayout(), dtype="float32", buffer_bytes=1 << 20)
    loss = ClippedPGLossFn(config.loss_fn, prev_equals_curr=True)  # one optimizer step per RL step: the ratio is 1
    tokenizer = load_tokenizer(model)
    means: list[float] = []
    try:
        for step in range(1, steps + 1):
            refit([LocalWorker("policy-0", sender)], [LocalWorker("engine-0", engine)], plan, version=step)
            engine.prepare(step)
            trajectories = list(engine.generate(make_requests(tokenizer, step), SAMPLING))
            rewards = [reward(trajectory) for trajectory in trajectories]
            batch = pack(trajectories, rewards, policy.row_multiple)
            samples, tokens = map(int, valid_counts(batch.loss_inputs()))  # over all rows and ranks, if there are more
            report = policy.train_step([batch], loss, global_valid_seqs=samples, global_valid_toks=tokens)
            policy.advance_schedule()
            means.append(sum(rewards) / len(rewards))
            print(f"step {step:>3}  reward {means[-1]:.3f}  grad norm {report.grad_norm:.2f}", flush=True)
    finally:
        sender.close_refit()
        engine.shutdown()  # before the policy, on whose torch.distributed group it was started
        policy.shutdown()
    return means


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # Megatron-Core names optional packages that a CPU has no use for
    main(*map(int, sys.argv[1:]))
