"""Verify one refit of a recipe with the real parts: every checksum, then the log-probs of engines and policy."""

from pathlib import Path

from grpo_mcore.base.stopping import StopRequest, on_sigterm
from grpo_mcore.cluster import Cluster
from grpo_mcore.driver.policy.refit_parity import Parity, measure_parity
from grpo_mcore.driver.policy.refit_settings import parity_check
from grpo_mcore.driver.policy.refit_step import refit_once
from grpo_mcore.driver.run.checks import Model, check_run
from grpo_mcore.driver.run.setup import start_cluster, start_policy_and_engines
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.refit.refit import RefitReport


def verify_refit(config: MasterConfig, logs: Path) -> tuple[RefitReport, Parity]:
    """Run `refit_and_compare` on its own cluster, whose workers log to `logs`."""
    model = check_run(config)
    with start_cluster(config, logs) as cluster, on_sigterm(StopRequest()):
        return refit_and_compare(config, model, cluster)


def refit_and_compare(config: MasterConfig, model: Model, cluster: Cluster) -> tuple[RefitReport, Parity]:
    """Start policy and engines, refit, compare, and end both. Raises RefitError, SetupError and what a worker raises.

    The engines always start with random weights, so all their final weights come from the refit.
    """
    check = parity_check(config)
    config = config.model_copy(deep=True)
    config.policy.refit_verify, config.policy.refit_parity = "full", None
    config.policy.generation.vllm_cfg.load_format = "dummy"
    policy, engines = start_policy_and_engines(config, cluster, model)
    try:
        report = refit_once(policy, engines)
        return report, measure_parity(policy, engines, check)
    finally:
        cluster.stop([*policy.workers, *engines.all_hosts()])
