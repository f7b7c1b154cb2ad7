"""Refit: make the engines' weights equal the policy's, and go on if engines die meanwhile."""

from collections.abc import Callable
from dataclasses import replace

from grpo_mcore.base.stopping import StopNow
from grpo_mcore.cluster import DeadlineExceeded, WorkerFailed
from grpo_mcore.driver.interfaces import ColocatablePolicyInterface, GenerationInterface
from grpo_mcore.driver.policy.refit_parity import SampledParity, measure_parity
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.refit.plan.plan import RefitError, plan_model_refit
from grpo_mcore.refit.refit import RefitReport, Timer, refit

GIB = 2**30
GRACE_S = 3.0
"""Seconds in which a refit may still end after an urgent request to stop; batch systems kill after 30 s."""

OnRestart = Callable[[str, str], None]
"""Called with the name of each worker that is restarted, and the reason."""


def refit_engines(
    policy: ColocatablePolicyInterface,
    engines: GenerationInterface,
    config: MasterConfig,
    on_restart: OnRestart = lambda worker, reason: None,
    *,
    lost_only: bool = False,
    timeline: Timer | None = None,
    sampled: SampledParity | None = None,
) -> RefitReport | None:
    """Refit all engines, as the training loop does; with `lost_only` those that are lost. Return None if there are no
    engines. Engines that die in it are restarted. Engines may be generating if
    grpo.async_grpo.in_flight_weight_updates allows it. `sampled`: compares the log-probs after some refits of all
    engines. An urgent request to stop ends the engines if the refit does not end within GRACE_S."""
    if not engines.slots:
        return None
    recompute_kv = config.grpo.async_grpo.recompute_kv_cache_after_weight_updates
    compared = None if lost_only else sampled

    def once(group: GenerationInterface) -> RefitReport:
        try:
            with policy.cluster.uninterrupted(GRACE_S):
                return refit_once(policy, group, timeline=timeline, recompute_kv=recompute_kv, sampled=compared)
        except StopNow:  # a policy rank that waits for an engine leaves the refit when that ends, and can save
            policy.background = None
            policy.cluster.stop(group.all_hosts())
            raise

    if any(slot.waits for slot in engines.slots):
        with policy.cluster.uninterrupted(GRACE_S):
            policy.offload()  # the successors of lost engines take its memory
    return refit_until_done(engines, once, on_restart, lost_only=lost_only)


def refit_until_done(
    engines: GenerationInterface,
    refit_group: Callable[[GenerationInterface], RefitReport],
    on_restart: OnRestart = lambda worker, reason: None,
    *,
    lost_only: bool = False,
) -> RefitReport:
    """Call `refit_group` on the engines, or with `lost_only` on those that are lost, until it succeeds. No engine is
    lost afterwards.

    After a failure, dead engines are replaced. Raises what `refit_group` raises if no engine is dead, or if too many
    have died in a row.
    """
    while True:
        try:
            engines.await_successors()
            numbers = sorted(engines.lost) if lost_only else list(range(len(engines.slots)))
            report = refit_group(engines.subset(numbers))
        except (RefitError, WorkerFailed, DeadlineExceeded) as error:
            dead = engines.replace_dead(error)
            if not dead:
                raise
            for number in dead:
                on_restart(engines.slots[number].worker.name, engines.lost[number])
        else:
            engines.mark_refitted(numbers)
            return report


def refit_once(
    policy: ColocatablePolicyInterface,
    engines: GenerationInterface,
    *,
    colocated: bool = True,
    buffer_gb: float | None = None,
    timeline: Timer | None = None,
    recompute_kv: bool = False,
    sampled: SampledParity | None = None,
) -> RefitReport:
    """Make every engine's weights equal the policy's, as weight version `policy.updates` + 1.

    The engines may generate meanwhile: they pause only for the commit, and requests under way go on with the new
    weights. Weights travel through the memory of their node; those that no policy rank of the node holds come over the
    network. `colocated` False: send everything over the network, as to engines with devices of their own. `buffer_gb`:
    size of the refit buffer in GiB, in place of policy.refit_buffer_size_gb. `recompute_kv`: compute the KV cache of
    requests under way again. Raises RefitError; the engines then have their old weights, or refuse to generate from
    mixed ones. With a limit in policy.refit_parity it also raises if the log-probs of the committed weights differ.
    `sampled`: chooses whether they are compared only for the report.
    """
    nodes = engines.nodes()
    size = policy.refit.buffer_gb if buffer_gb is None else buffer_gb
    plan = plan_model_refit(
        policy.shape,
        policy.layout,
        engines.layout,
        dtype=policy.precision,
        buffer_bytes=int(size * GIB),
        deliveries=len(nodes.hosts) // engines.layout.nodes,
        adapters=policy.refit.adapters,
    )
    version = policy.updates + 1
    if not colocated and policy.shares_process(nodes.hosts):
        raise ValueError(
            "policy and engines of one process are colocated: over the network each would wait for the other"
        )
    rank_nodes = policy.node_of_rank(nodes.hosts) if colocated and engines.colocated else []
    on_one_node = bool(rank_nodes) and len(nodes.hosts) == 1 and not any(rank_nodes)  # needs only the node's memory
    if not on_one_node:
        receivers = [rank_nodes.index(number) for number in range(len(nodes.hosts))] if rank_nodes else []
        policy.connect_to([policy.workers[rank] for rank in receivers] or nodes.hosts)
    policy.offload()
    report = refit(
        policy.workers,
        engines.workers,
        plan,
        version,
        verify=policy.refit.verify,
        recompute_kv=recompute_kv,
        nodes=None if on_one_node else nodes,
        node_of_rank=[] if on_one_node else rank_nodes,
        timeline=timeline,
        clock=policy.cluster.clock,
        timeout_s=policy.cluster.call_timeout_s,
    )
    engines.committed(version)
    engines.prepare()
    if policy.refit.parity is not None:
        parity = measure_parity(policy, engines, policy.refit.parity)
        if not parity.ok:
            raise RefitError(f"policy.refit_parity: {parity.difference()}")
        report = replace(report, mult_prob_error=parity.mult_error)
    elif sampled is not None and sampled.due():
        with sampled.measured():
            parity = measure_parity(policy, engines, sampled.check)
        report = replace(report, mult_prob_error=parity.mult_error)
    return report
