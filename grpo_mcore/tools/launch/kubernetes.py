"""Render a job as Kubernetes manifests: a ConfigMap with the recipe, a RayJob (ray.io/v1) that runs it, the
NetworkPolicy of its pods, and a PodMonitor where it is asked for."""

import json
import re
import shlex
from hashlib import sha256
from importlib import metadata
from typing import Any

import yaml

from grpo_mcore.tools.launch.spec import LaunchSpec, Pool
from grpo_mcore.tools.launch.validation import RECIPE_FOLDER, seconds

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
        f"# Pod Security level of its pods: {pod_security_level(spec)}\n"
    )
    return head + yaml.dump_all(documents(spec), Dumper=_Dumper, sort_keys=False, width=110)


def documents(spec: LaunchSpec) -> list[dict[str, Any]]:
    """Return the ConfigMap, which holds the recipe and the texts that it names, the RayJob, and what guards and watches
    its pods."""
    k8s = spec.launch.k8s
    labels = {"app.kubernetes.io/name": "grpo-mcore"}
    queue = {label: k8s.queue for label in GANG_LABELS[k8s.scheduler] if k8s.queue}
    if k8s.scheduler == "yunikorn":
        queue |= {"ray.io/gang-scheduling-enabled": "true", "yunikorn.apache.org/app-id": spec.name}
    if k8s.priority_class:
        queue["ray.io/priority-class-name"] = k8s.priority_class
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _recipe_name(spec), "namespace": k8s.namespace, "labels": labels},
        "data": _recipe_data(spec),
    }
    password = {"valueFrom": _secret(k8s.gcs_redis_secret)} if k8s.gcs_redis_secret else None
    groups = [(pool, pool.nodes - (pool == spec.pools[0])) for pool in spec.pools]
    cluster = {
        "rayVersion": _ray_version(),
        "authOptions": {"mode": "token"},
        # The head is the run's first node: the driver looks for accelerators where it runs, and a head without any
        # would be one more pod for the gang.
        "headGroupSpec": {
            "rayStartParams": {"num-gpus": str(spec.pools[0].gpus_per_node), "dashboard-host": "0.0.0.0"},
            "template": _template(spec, spec.pools[0], head=True),
        },
        # The sizes of worker groups are fixed: training does not shrink.
        "workerGroupSpecs": [
            {
                "groupName": pool.name,
                **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), size),
                "rayStartParams": {"num-gpus": str(pool.gpus_per_node)},
                "template": _template(spec, pool),
            }
            for pool, size in groups
            if size
        ]
        or None,
        "gcsFaultToleranceOptions": (
            {"redisAddress": k8s.gcs_redis_address, "redisPassword": password} if k8s.gcs_redis_address else None
        ),
    }
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": spec.name, "namespace": k8s.namespace, "labels": labels | queue},
        "spec": {
            "submissionMode": "SidecarMode" if k8s.gcs_redis_address is None else "HTTPMode",
            "entrypoint": shlex.join(spec.command(f"{RECIPE_FOLDER}/recipe.yaml")),
            # The pods are deleted when the run has ended; checkpoints and logs are on the volume.
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 300,
            # A failed run starts again on new pods and resumes from its newest checkpoint.
            "backoffLimit": spec.restarts,
            "activeDeadlineSeconds": seconds(spec.time_limit) * (spec.restarts + 1),
            # Limits the wait for pods that cannot be scheduled; not that in a queue, which these schedulers keep with
            # the pods pending. Kueue's begins after its queue.
            "preRunningDeadlineSeconds": (
                None if k8s.scheduler in ("volcano", "yunikorn", "kai") else max(1800, 3 * spec.start_timeout_s)
            ),
            "suspend": True if k8s.scheduler == "kueue" else None,  # Kueue starts it when there is room for all pods
            "rayClusterSpec": cluster,
        },
    }
    return [_without_none(document) for document in (recipe, job, *_around(spec, labels))]


JOB_LABEL = "grpo-mcore/job"
"""Label of all pods of a job, with its name."""
DASHBOARD_PORT = 8265


def _around(spec: LaunchSpec, labels: dict[str, str]) -> list[dict[str, Any]]:
    """Return the NetworkPolicy and the PodMonitor of a job's pods, those that it has."""
    k8s, pods = spec.launch.k8s, {"matchLabels": {JOB_LABEL: spec.name}}
    metadata = {"name": spec.name, "namespace": k8s.namespace, "labels": labels}
    ports = [{"protocol": "TCP", "port": port} for port in (DASHBOARD_PORT, spec.metrics_port) if port]
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": pods}]},
                {"from": [{"namespaceSelector": {}}], "ports": ports},  # Ray asks for the job's token
            ],
        },
    }
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": {JOB_LABEL: spec.name, "ray.io/node-type": "head"}},  # the driver's pod
            "podMetricsEndpoints": [{"portNumber": spec.metrics_port}],
        },
    }
    wants_monitor = k8s.pod_monitor and spec.metrics_port is not None
    return [*([policy] if k8s.network_policy else []), *([monitor] if wants_monitor else [])]


def pod_security_level(spec: LaunchSpec) -> str:
    """Return the strictest level of Kubernetes' Pod Security Standards that admits the job's pods."""
    k8s = spec.launch.k8s
    reasons = {
        "the sandbox of programs needs seccomp Unconfined": spec.sandboxes,
        "launch.k8s.host_network": k8s.host_network,
        "launch.k8s.rdma_resource adds IPC_LOCK": k8s.rdma_resource is not None,
        "a hostPath in launch.k8s.volumes": any("hostPath" in source for source in k8s.volumes.values()),
    }
    because = ", ".join(reason for reason, applies in reasons.items() if applies)
    return f"privileged ({because})" if because else "restricted"


def _recipe_data(spec: LaunchSpec) -> dict[str, str]:
    return {"recipe.yaml": spec.recipe_yaml} | {f"text-{i}": text for i, (_, text) in enumerate(spec.texts)}


def _recipe_name(spec: LaunchSpec) -> str:
    """Return the ConfigMap's name, which differs with its content: it outlives its job, and `kubectl create` goes on
    with a RayJob whose ConfigMap exists, which would train the recipe of an earlier launch."""
    return f"{spec.name}-recipe-{sha256(json.dumps(_recipe_data(spec)).encode()).hexdigest()[:8]}"


def _without_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _template(spec: LaunchSpec, pool: Pool, *, head: bool = False) -> dict[str, Any]:
    """Return the pods of a pool with their label and annotations."""
    return {
        "metadata": {"labels": {JOB_LABEL: spec.name}, "annotations": spec.launch.k8s.annotations or None},
        "spec": _pod(spec, pool, head=head),
    }


def _pod(spec: LaunchSpec, pool: Pool, *, head: bool = False) -> dict[str, Any]:
    """Return the pod spec of one node. Text files are mounted next to the recipe, under the names that it uses."""
    launch, k8s, gpus = spec.launch, spec.launch.k8s, pool.gpus_per_node
    amounts = {"cpu": str(launch.cpus_per_node), "memory": f"{spec.memory_gb}Gi"}
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    rdma = k8s.rdma_resource if gpus else None
    if rdma:
        amounts[rdma] = str(k8s.rdma_count)
    cache = {"HF_HOME": f"{k8s.volume_path}/huggingface"} if k8s.volume_claim else {}
    variables = {key: value for key, value in (ENVIRONMENT | cache).items() if key not in k8s.secrets}
    variables |= spec.variables
    staged = {"HF_HUB_CACHE": f"{launch.stage_to}/hub"} if launch.stage_to else {}
    if launch.code:
        variables["PYTHONPATH"] = ":".join(filter(None, [RECIPE_FOLDER, spec.variables.get("PYTHONPATH")]))
    files = [("recipe.yaml", "recipe.yaml"), *((f"text-{i}", name) for i, (name, _) in enumerate(spec.texts))]
    volumes: list[dict[str, Any]] = [
        {
            "name": "recipe",
            "configMap": {"name": _recipe_name(spec), "items": [{"key": key, "path": name} for key, name in files]},
        },
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{k8s.shm_gb}Gi"}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if k8s.volume_claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": k8s.volume_claim}})
        mounts.append({"name": "shared", "mountPath": k8s.volume_path})
    for number, (path, source) in enumerate(sorted(k8s.volumes.items())):
        volumes.append({"name": f"volume-{number}", **source})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if gpus else []
    user = k8s.run_as_user or UID
    secrets = [{"name": key, "valueFrom": _secret(where)} for key, where in sorted(k8s.secrets.items())]
    container = {
        "name": "ray-head" if head else "ray-worker",
        "image": launch.container,
        "workingDir": k8s.volume_path if k8s.volume_claim else "/tmp",
        "env": [*({"name": key, "value": _literal(value)} for key, value in (variables | staged).items()), *secrets],
        "resources": {"limits": amounts, "requests": amounts},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            # RDMA needs pinned memory: this, or nodes whose limit of it (memlock) is unlimited.
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"] if rdma else None},
        },
        "volumeMounts": mounts,
    }
    copying = {  # it reads the models from where they are without launch.stage_to
        **container,
        "name": "stage",
        "env": [*({"name": key, "value": _literal(value)} for key, value in variables.items()), *secrets],
        "command": ["python", "-P", "-m", "grpo_mcore.cli.main", "prefetch", f"{RECIPE_FOLDER}/recipe.yaml"],
        "args": ["--stage", _literal(launch.stage_to or "")],
    }
    return {
        "restartPolicy": "Always" if head and k8s.gcs_redis_address else "Never",
        "serviceAccountName": k8s.service_account,
        "priorityClassName": k8s.priority_class,
        "imagePullSecrets": [{"name": name} for name in k8s.image_pull_secrets] or None,
        "nodeSelector": (k8s.node_selector if gpus else None) or None,
        "affinity": k8s.affinity or None,
        "tolerations": [*tolerations, *k8s.tolerations] or None,
        "hostNetwork": True if k8s.host_network else None,
        "dnsPolicy": "ClusterFirstWithHostNet" if k8s.host_network else None,
        "automountServiceAccountToken": False,
        # A Service named vllm or ray would give its address to variables that these read as their settings.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "fsGroup": user,
            # The default profile refuses bubblewrap its namespaces; it confines programs with a filter of its own.
            "seccompProfile": {"type": "Unconfined" if spec.sandboxes else "RuntimeDefault"},
        },
        "initContainers": [copying] if launch.stage_to else None,
        "containers": [container],
        "volumes": volumes,
    }


def _literal(text: str) -> str:
    """Return a text for a container's env or args, in which Kubernetes reads $$ as $ and $(NAME) as a variable."""
    return text.replace("$", "$$")


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
    """Writes texts of several lines as blocks, and in quotes all that another reader might take for no text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


NO_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Words that YAML of one version or another reads as something else; kubectl is stricter than Python's."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.fullmatch(r"[A-Za-z_/][\w./:@ -]*", text) and text.lower() not in NO_TEXT
    style = "|" if "\n" in text else None if plain else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
