"""Calls of policy ranks and engines that mypy must accept or refuse. It checks this file with the package: an error
that it does not find is an unused `type: ignore`, which it reports."""

from __future__ import annotations

from grpo_mcore.cluster import Cluster, Worker, call_all, remote_call, remote_stream
from grpo_mcore.driver.engines.engine_group import EngineWorker
from grpo_mcore.driver.policy.policy_group import PolicyGroup
from grpo_mcore.driver.policy.policy_worker import PolicyWorker
from grpo_mcore.refit.policy_side.sender import RefitSender
from grpo_mcore.rollout.trajectory import Sampling


def calls(cluster: Cluster, worker: Worker, policy: PolicyGroup, sampling: Sampling) -> None:
    remote_call(worker, EngineWorker.prepare, purpose="prepare")(3)
    remote_call(worker, EngineWorker.prepare)("3")  # type: ignore[arg-type]
    remote_call(worker, EngineWorker.commit_refit)(3, True)
    remote_call(worker, EngineWorker.commit_refit)()  # type: ignore[call-arg]
    remote_call(worker, EngineWorker.no_such_method)()  # type: ignore[attr-defined]
    remote_stream(worker, EngineWorker.generate_refs)([], sampling)
    remote_stream(worker, EngineWorker.generate_refs)(sampling, [])  # type: ignore[arg-type]
    remote_call(worker, PolicyWorker.infer_logprobs)(True, False, None)
    remote_call(worker, PolicyWorker.infer_logprobs)("prev", False, None)  # type: ignore[arg-type]
    remote_call(worker, RefitSender.open_refit)(b"", None, {}, None)
    remote_call(worker, RefitSender.open_refit)("part", None)  # type: ignore[arg-type]
    saved: list[bool] = call_all(cluster, [worker], PolicyWorker.is_saved)(True)
    saved = call_all(cluster, [worker], PolicyWorker.is_saved)(True, 1)  # type: ignore[call-arg]
    policy._all(PolicyWorker.start_save, "saving")("folder", True)
    policy._all(PolicyWorker.start_save, "saving")("folder", "optimizer")  # type: ignore[arg-type]
    policy._all(EngineWorker.health, "health")()  # type: ignore[arg-type]
    del saved
