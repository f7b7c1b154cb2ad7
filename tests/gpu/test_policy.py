"""The policy on one GPU: the local layer spec with torch's variable-length attention, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import torch

from grpo_mcore.base.processes import free_port
from grpo_mcore.tools.demo.tiny_models import SIZES, make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase, micro_batches, policy_config, sequences


def test_logprobs_are_near_transformers_and_a_step_changes_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from grpo_mcore.objective import NLLLossFn
    from grpo_mcore.parallel.mesh import Address
    from grpo_mcore.parallel.policy import Policy

    folder = make_tiny_model("qwen3", tmp_path, tie_word_embeddings=True, head_dim=64)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    config = policy_config(folder, LayoutCase("TP1"), precision="bfloat16")
    policy = Policy(config, Address(0, 1, 0, "127.0.0.1", free_port()), seed=1, timeout_s=60, reference=False)
    try:
        batches = micro_batches(policy)
        rows = policy.logprobs(batches) or []
        found = {
            int(name): part
            for batch, row in zip(batches, rows, strict=True)
            for name, part in zip(batch.names, batch.split(row), strict=True)
        }
        for i, tokens in enumerate(sequences(SIZES["vocab_size"])):
            with torch.no_grad():
                scores = torch.log_softmax(network(tokens[None].cuda()).logits[0, :-1], -1)
            expected = scores.gather(1, tokens[1:, None].cuda()).squeeze(1)
            assert (found[i][1:] - expected).abs().mean() < 0.03
        for _ in range(2):  # the second step trains what came back from the host
            report = policy.train_step(batches, NLLLossFn(), global_valid_seqs=8, global_valid_toks=93)
            assert report.grad_norm > 0
            policy.offload()
            policy.onload()
            now = policy.logprobs(batches) or []
            assert not torch.equal(now[0], rows[0])
            rows = now
    finally:
        policy.shutdown()
