"""One refit of a recipe with its real parts, checked: every checksum, then log-probs of the engines and the policy."""

from __future__ import annotations

from pathlib import Path

from grpo_mcore.algorithms.lifecycle.stopping import StopRequest, on_sigterm
from grpo_mcore.algorithms.setup import (
    Model,
    check_run,
    parity_check,
    start_cluster,
    start_engines,
    start_policy,
    wait_until_ready,
)
from grpo_mcore.algorithms.weight_sync.refit_parity import Parity, measure_parity
from grpo_mcore.algorithms.weight_sync.refit_step import refit_once
from grpo_mcore.cluster import Cluster
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.refit import RefitReport


def verify_refit(config: MasterConfig) -> tuple[RefitReport, Parity]:
    """`refit_and_compare` on a cluster of its own."""
    model = check_run(config)
    logs = Path(config.logger.log_dir) / "refit-verify"
    print(f"starting policy and engines (logs: {logs}) ...", flush=True)
    with start_cluster(config, logs) as cluster, on_sigterm(StopRequest()):
        return refit_and_compare(config, model, cluster)


def refit_and_compare(config: MasterConfig, model: Model, cluster: Cluster) -> tuple[RefitReport, Parity]:
    """Starts policy and engines, refits, compares, and ends both. Raises RefitError, SetupError and what a worker
    raises.

    The engines start with random weights, whatever the recipe says: what they have in the end came by the refit.
    """
    check = parity_check(config)
    config = config.model_copy(deep=True)
    config.policy.refit_verify, config.policy.refit_parity = "full", None
    config.policy.generation.vllm_cfg.load_format = "dummy"
    policy = start_policy(config, cluster, model)
    engines = start_engines(config, cluster, model, policy)
    workers = [*policy.workers, *engines.all_hosts()]
    try:
        wait_until_ready(config, cluster, workers)
        report = refit_once(policy, engines)
        return report, measure_parity(policy, engines, check)
    finally:
        cluster.stop(workers)
