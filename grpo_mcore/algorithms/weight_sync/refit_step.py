"""The loop's refit: the engines' weights become the policy's."""

from __future__ import annotations

from dataclasses import replace

from grpo_mcore.algorithms.engines.engine_group import EngineGroup
from grpo_mcore.algorithms.training_step.policy_group import PolicyGroup
from grpo_mcore.algorithms.weight_sync.refit_parity import measure_parity
from grpo_mcore.algorithms.weight_sync.refit_retries import Restarted, refit_through_deaths
from grpo_mcore.cluster import LocalCluster
from grpo_mcore.observe import Timeline
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.refit import RefitError, RefitReport, plan_model_refit, refit

GIB = 2**30


def refit_engines(
    policy: PolicyGroup,
    engines: EngineGroup,
    config: MasterConfig,
    restarted: Restarted = lambda worker, why: None,
    *,
    lost_only: bool = False,
) -> RefitReport:
    """The loop's refit. Engines may be generating, where grpo.async_grpo.in_flight_weight_updates lets them. Those that
    die in it are started anew. `lost_only`: of the engines that were started anew since the last one."""
    recompute_kv = config.grpo.async_grpo.recompute_kv_cache_after_weight_updates

    def once(group: EngineGroup) -> RefitReport:
        return refit_once(policy, group, recompute_kv=recompute_kv)

    return refit_through_deaths(engines, once, restarted, lost_only=lost_only)


def refit_once(
    policy: PolicyGroup,
    engines: EngineGroup,
    *,
    colocated: bool = True,
    buffer_gb: float | None = None,
    timeline: Timeline | None = None,
    recompute_kv: bool = False,
) -> RefitReport:
    """Make every engine's weights equal the policy's, as weight version `policy.updates` + 1.

    The engines may generate meanwhile: they pause only for the commit, and requests under way go on with the new
    weights. Weights travel through the memory of their node; what no policy rank of the node holds comes to it over the
    network. `colocated` False: send everything over the network, as to engines with devices of their own. `buffer_gb`:
    size of the refit buffer in GiB, in place of policy.refit_buffer_size_gb. `recompute_kv`: compute the KV cache of
    requests under way again. Raises RefitError; the engines then have their old weights, or refuse to generate from
    mixed ones. With policy.refit_parity it also raises where the log-probs of the committed weights differ.
    """
    if not colocated and isinstance(policy.cluster, LocalCluster):
        raise ValueError("policy and engines of one process are colocated: over a wire each would wait for the other")
    size = policy.refit_buffer_gb if buffer_gb is None else buffer_gb
    plan = plan_model_refit(
        policy.shape,
        policy.refit_layout,
        engines.layout,
        dtype=policy.precision,
        buffer_bytes=int(size * GIB),
    )
    version = policy.updates + 1
    nodes = engines.nodes()
    homes = policy.homes(nodes.hosts) if colocated and engines.colocated else []
    on_one_node = bool(homes) and len(nodes.hosts) == 1 and not any(homes)  # through its memory alone
    if not on_one_node:
        receivers = [homes.index(number) for number in range(len(nodes.hosts))] if homes else []
        policy.link_to([policy.workers[rank] for rank in receivers] or nodes.hosts)
    policy.offload()
    report = refit(
        policy.workers,
        engines.workers,
        plan,
        version,
        verify=policy.refit_verify,
        recompute_kv=recompute_kv,
        nodes=None if on_one_node else nodes,
        homes=[] if on_one_node else homes,
        timeline=timeline,
        timeout_s=policy.cluster.call_timeout_s,
    )
    engines.weight_version = version
    engines.prepare()
    if policy.refit_parity is not None:
        parity = measure_parity(policy, engines, policy.refit_parity)
        if not parity.ok:
            raise RefitError(f"policy.refit_parity: {parity.difference()}")
        report = replace(report, mult_prob_error=parity.mult_error)
    return report
