"""Render a job as Kubernetes manifests: a ConfigMap with the recipe, and a RayJob (ray.io/v1) that runs it."""

from __future__ import annotations

import shlex
from importlib import metadata
from typing import Any

import yaml

from grpo_mcore.tools.launch.spec import LaunchSpec, Pool

RECIPE_FOLDER = "/etc/grpo-mcore"
UID = 1000
"""User id of the image's user."""

GANG_LABELS = {
    "kueue": ("kueue.x-k8s.io/queue-name",),
    "volcano": ("volcano.sh/queue-name",),
    "yunikorn": ("yunikorn.apache.org/queue",),
    "kai": ("kai.scheduler/queue",),
    "none": (),
}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_memory_monitor_refresh_ms": "0",
}


def manifest(spec: LaunchSpec) -> str:
    """Return the YAML for `kubectl create -f`."""
    head = (
        f"# {spec.recipe_file} on Kubernetes. Written by: grpo-mcore launch k8s {spec.recipe_file} --dry-run\n"
        "# kubectl create -f FILE; kubectl get rayjob; kubectl logs -f job/NAME or the submitter's container\n"
    )
    return head + yaml.dump_all(documents(spec), Dumper=_Dumper, sort_keys=False, width=110)


def documents(spec: LaunchSpec) -> list[dict[str, Any]]:
    """Return the ConfigMap and the RayJob."""
    return [_config_map(spec), _ray_job(spec)]


def _metadata(spec: LaunchSpec, name: str, labels: dict[str, str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name}
    if spec.k8s.namespace:
        found["namespace"] = spec.k8s.namespace
    return found | {"labels": {"app.kubernetes.io/name": "grpo-mcore"} | (labels or {})}


def _config_map(spec: LaunchSpec) -> dict[str, Any]:
    data = {"recipe.yaml": spec.recipe_yaml} | {f"text-{i}": text for i, (_, text) in enumerate(spec.texts)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(spec, f"{spec.name}-recipe"),
        "data": data,
    }


def _ray_job(spec: LaunchSpec) -> dict[str, Any]:
    k8s = spec.k8s
    queue = {label: k8s.queue for label in GANG_LABELS[k8s.scheduler] if k8s.queue}
    if k8s.scheduler == "yunikorn":
        queue |= {"ray.io/gang-scheduling-enabled": "true", "yunikorn.apache.org/app-id": spec.name}
    if k8s.priority_class:
        queue["ray.io/priority-class-name"] = k8s.priority_class
    job: dict[str, Any] = {
        "submissionMode": "SidecarMode" if k8s.gcs_redis_address is None else "HTTPMode",
        "entrypoint": shlex.join(spec.command(f"{RECIPE_FOLDER}/recipe.yaml")),
        # The pods are deleted when the run has ended; checkpoints and logs are on the volume.
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        # A failed run starts again on new pods and resumes from its newest checkpoint.
        "backoffLimit": spec.restarts,
        "activeDeadlineSeconds": spec.time_limit_s * (spec.restarts + 1),
        # Limits the wait for pods that cannot be scheduled.
        "preRunningDeadlineSeconds": max(1800, 3 * spec.start_timeout_s),
    }
    if k8s.scheduler == "kueue":
        job["suspend"] = True  # Kueue starts it when there is room for all pods
    cluster: dict[str, Any] = {
        "rayVersion": _ray_version(),
        "authOptions": {"mode": "token"},
        # The head is the run's first node: the driver looks for accelerators where it runs, and a head without any
        # would be one more pod for the gang.
        "headGroupSpec": {
            "rayStartParams": {"num-gpus": str(spec.pools[0].gpus_per_node), "dashboard-host": "0.0.0.0"},
            "template": {"spec": _pod(spec, spec.pools[0], head=True)},
        },
    }
    if groups := _groups(spec):
        cluster["workerGroupSpecs"] = groups
    if k8s.gcs_redis_address:
        cluster["gcsFaultToleranceOptions"] = _gcs(spec)
    job["rayClusterSpec"] = cluster
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(spec, spec.name, queue), "spec": job}


def _gcs(spec: LaunchSpec) -> dict[str, Any]:
    options: dict[str, Any] = {"redisAddress": spec.k8s.gcs_redis_address}
    if spec.k8s.gcs_redis_secret:
        options["redisPassword"] = {"valueFrom": _secret(spec.k8s.gcs_redis_secret)}
    return options


def _groups(spec: LaunchSpec) -> list[dict[str, Any]]:
    """Return the worker groups of all nodes but the head. Their sizes are fixed: training does not shrink."""
    sizes = [pool.nodes - (pool == spec.pools[0]) for pool in spec.pools]
    return [
        {
            "groupName": pool.name,
            "replicas": size,
            "minReplicas": size,
            "maxReplicas": size,
            "rayStartParams": {"num-gpus": str(pool.gpus_per_node)},
            "template": {"spec": _pod(spec, pool)},
        }
        for pool, size in zip(spec.pools, sizes, strict=True)
        if size
    ]


def _pod(spec: LaunchSpec, pool: Pool, *, head: bool = False) -> dict[str, Any]:
    """Return the pod spec of one node."""
    k8s = spec.k8s
    pod: dict[str, Any] = {"restartPolicy": "Never"}
    if head and k8s.gcs_redis_address:
        pod["restartPolicy"] = "Always"
    if k8s.service_account:
        pod["serviceAccountName"] = k8s.service_account
    if k8s.priority_class:
        pod["priorityClassName"] = k8s.priority_class
    if k8s.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in k8s.image_pull_secrets]
    if pool.gpus_per_node:
        if k8s.node_selector:
            pod["nodeSelector"] = dict(k8s.node_selector)
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if k8s.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    pod |= {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": UID, "fsGroup": UID},
        "containers": [_container(spec, pool, "ray-head" if head else "ray-worker")],
        "volumes": _volumes(spec),
    }
    return pod


def _container(spec: LaunchSpec, pool: Pool, name: str) -> dict[str, Any]:
    k8s = spec.k8s
    amounts: dict[str, Any] = {"cpu": str(spec.cpus_per_node), "memory": f"{spec.memory_gb_per_node}Gi"}
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if pool.gpus_per_node:
        amounts["nvidia.com/gpu"] = str(pool.gpus_per_node)
        if k8s.rdma_resource:
            amounts[k8s.rdma_resource] = str(k8s.rdma_count)
            capabilities["add"] = ["IPC_LOCK"]  # RDMA needs pinned memory
    variables = ENVIRONMENT | dict(spec.environment)
    environment: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in variables.items()]
    if k8s.volume_claim:
        environment.append({"name": "HF_HOME", "value": f"{k8s.volume_path}/huggingface"})
    environment += [{"name": name, "valueFrom": _secret(where)} for name, where in sorted(k8s.secrets.items())]
    return {
        "name": name,
        "image": spec.container,
        "workingDir": k8s.volume_path if k8s.volume_claim else "/tmp",
        "env": environment,
        "resources": {"limits": dict(amounts), "requests": dict(amounts)},
        "securityContext": {"allowPrivilegeEscalation": bool(capabilities.get("add")), "capabilities": capabilities},
        "volumeMounts": [
            {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            *([{"name": "shared", "mountPath": k8s.volume_path}] if k8s.volume_claim else []),
        ],
    }


def _volumes(spec: LaunchSpec) -> list[dict[str, Any]]:
    """Return the volumes. Text files are mounted next to the recipe, under the names that it uses."""
    items = [{"key": "recipe.yaml", "path": "recipe.yaml"}]
    items += [{"key": f"text-{i}", "path": name} for i, (name, _) in enumerate(spec.texts)]
    volumes: list[dict[str, Any]] = [
        {"name": "recipe", "configMap": {"name": f"{spec.name}-recipe", "items": items}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{spec.k8s.shm_gb}Gi"}},
    ]
    if spec.k8s.volume_claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": spec.k8s.volume_claim}})
    return volumes


def _secret(reference: str) -> dict[str, Any]:
    name, key = reference.split("/")
    return {"secretKeyRef": {"name": name, "key": key}}


def _ray_version() -> str:
    """Return the Ray version that this package pins, which is the image's."""
    for line in metadata.requires("grpo-mcore") or []:
        if line.startswith("ray"):
            return line.partition("==")[2].partition(";")[0].strip()
    raise RuntimeError("grpo-mcore does not say which Ray it needs; reinstall it")


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
