"""The same policy class under torchrun as in the rank pool."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_mcore.parallel.mesh import Address, RendezvousError
from grpo_mcore.tools.demo.tiny_models import make_tiny_model
from grpo_mcore.tools.parity.rank import LayoutCase
from grpo_mcore.tools.parity.rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(make_tiny_model("qwen3", tmp_path / "model", tie_word_embeddings=True))


def test_ranks_with_torchruns_variables_compute_the_same(ranks: RankPool, model: str) -> None:
    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (total, norm), _ = ranks.run(2, "tests.distributed.torchrun_script:in_the_pool", model, agent.port)
    equals_the_pool(ranks, model, total, norm)


@pytest.mark.every_state  # three processes import torch and two Megatron-Core; our part of it is the test above
def test_two_ranks_under_torchrun_compute_the_same_as_in_the_pool(ranks: RankPool, model: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.distributed.torchrun_script", model],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if "RESULT" in line)
    total, norm = map(float, line.split()[-2:])
    equals_the_pool(ranks, model, total, norm)


def equals_the_pool(ranks: RankPool, model: str, total: float, norm: float) -> None:
    pool = ranks.run(2, "grpo_mcore.tools.parity.rank:logprobs_and_gradients", model, LayoutCase("TP2", tensor=2))[0]
    assert total == pytest.approx(sum(part.sum().item() for part in pool["logprobs"].values()), abs=1e-4)
    assert norm == pytest.approx(pool["grad_norm"], rel=1e-5)


def test_outside_torchrun_the_error_names_the_missing_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RendezvousError, match="not under torchrun: RANK"):
        Address.from_environment()
