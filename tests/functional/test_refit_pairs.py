"""Real policy ranks and real engines under Ray, in the layouts that a refit has to bring together: every copy by its
checksum, then log-probs of what the engines say."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_mcore.cluster.ray_cluster import RayCluster
from grpo_mcore.driver.run.checks import check_run
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.demo.arithmetic import make_tokenizer
from grpo_mcore.tools.demo.tiny_models import ENGINE_SIZES, make_tiny_model
from grpo_mcore.tools.refit_verify import refit_and_compare
from tests.functional.runs import Task, grpo_recipe, write_recipe


@dataclass(frozen=True)
class Pair:
    """A policy of `ranks` processes and `engines` of `engine_tensor` x `engine_pipeline` each."""

    family: str
    ranks: int
    engine_tensor: int = 1
    engine_pipeline: int = 1
    engines: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    colocated: bool = True


PAIRS = {
    "TP2 to PP2, pools": Pair("qwen3", 2, engine_pipeline=2, tensor=2, colocated=False),
    "EP2 within TP2 to TP2": Pair("qwen3_moe", 2, engine_tensor=2, tensor=2, expert=2),
    "TP2 to TP2, Mamba2": Pair("nemotron_h", 2, engine_tensor=2, tensor=2),
    "TP2 x PP2 to PP2, pools": Pair("qwen3", 4, engine_pipeline=2, tensor=2, pipeline=2, colocated=False),
    "EP2 x TP2 to TP2": Pair("qwen3_moe", 4, engine_tensor=2, tensor=2, expert=2),
    "DP2 to 2 engines, pools": Pair("qwen2", 2, engines=2, colocated=False),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    logs = tmp_path_factory.mktemp("logs")
    with RayCluster(logs, address="local", num_cpus=4, start_timeout_s=150, call_timeout_s=120) as cluster:
        yield cluster


def recipe_of(pair: Pair, task: Task, folder: Path) -> dict[str, Any]:
    sizes = {"vocab_size": 32, "eos_token_id": 2} | ({} if pair.family == "nemotron_h" else {"num_hidden_layers": 4})
    make_tiny_model(pair.family, folder / "model", **ENGINE_SIZES.get(pair.family, {}) | sizes)
    make_tokenizer(folder / "model")
    recipe = grpo_recipe(task, folder / "model")
    recipe["policy"]["megatron_cfg"] |= {
        "tensor_model_parallel_size": pair.tensor,
        "pipeline_model_parallel_size": pair.pipeline,
        "expert_model_parallel_size": pair.expert,
        "sequence_parallel": pair.tensor > 1 and pair.expert > 1,
    }
    generation = recipe["policy"]["generation"]
    generation["vllm_cfg"] |= {
        "tensor_parallel_size": pair.engine_tensor,
        "pipeline_parallel_size": pair.engine_pipeline,
    }
    processes = pair.ranks
    if pair.colocated:
        generation["num_engines"] = pair.engines
    else:
        of_engines = pair.engines * pair.engine_tensor * pair.engine_pipeline
        generation["colocated"] = {"enabled": False, "resources": {"gpus_per_node": of_engines}}
        processes += of_engines
    recipe["cluster"] = {"platform": "cpu", "gpus_per_node": processes}
    return recipe


# `make test` compares with fewer processes: "TP2 to PP2, pools" in the run of test_async_ray.py, layouts and experts
# in distributed/test_refit_layouts.py, slices of an engine's ranks in test_engine_layout.py, families in
# test_engine_families.py, engines of two ranks that share memory with the policy in test_engine_tied.py and
# test_refit_faults.py, the command in test_refit_verify.py.
@pytest.mark.every_state
@pytest.mark.parametrize("name", PAIRS)
def test_the_engines_hold_and_say_what_the_policy_does(
    cluster: RayCluster, task: Task, tmp_path: Path, name: str
) -> None:
    pair = PAIRS[name]
    config = load_recipe(write_recipe(tmp_path, recipe_of(pair, task, tmp_path)), []).config
    report, parity = refit_and_compare(config, check_run(config), cluster)
    assert report.checked > 0 and not report.fallbacks and not report.in_place
    assert len(parity.engines) == pair.engines
    for engine in parity.engines:
        assert engine.tokens >= 8 and engine.worst < 1.0001, parity.table()
