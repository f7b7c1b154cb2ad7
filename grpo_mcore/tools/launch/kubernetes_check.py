"""What Kubernetes, KubeRay's operator and the kubelet would say of a RayJob manifest, without any of them.

Three layers, because an accepted manifest can still fail an hour later: the API server (schema and rules of the custom
resource), the operator (rules that the schema does not hold), and the start of the pods.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

LONGEST_NAME = 47
"""The operator makes names of services and pods from that of the job."""
MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_KEPT = ("type", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "required")
Object = dict[str, Any]


class CrdError(ValueError):
    """A file that does not hold KubeRay's definition of a RayJob."""


def read_crd(file: Path) -> Object:
    """The openAPIV3Schema of ray.io/v1 RayJob: of a custom resource definition, as `kubectl get crd rayjobs.ray.io
    -o yaml` prints it, or as it stands. Raises CrdError."""
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise CrdError(f"{file} is not readable: {error}") from error
    versions = found.get("spec", {}).get("versions", []) if isinstance(found, dict) else []
    for version in versions:
        if version["name"] == "v1":
            found = version["schema"]["openAPIV3Schema"]
    if not isinstance(found, dict) or "spec" not in found.get("properties", {}):
        raise CrdError(f"{file} holds no schema of ray.io/v1 RayJob: kubectl get crd rayjobs.ray.io -o yaml > {file}")
    return found


def check_file(file: Path, schema: Object) -> list[str]:
    """A line for each problem of the RayJobs in a file. A file without one is a problem. `schema`: see `read_crd`."""
    try:
        documents = [document for document in yaml.safe_load_all(file.read_text()) if document is not None]
    except (OSError, yaml.YAMLError) as error:
        return [f"  not readable: {error}"]
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == "RayJob"]
    if not jobs:
        return ["  there is no RayJob in it"]
    return [f"  {finding}" for job in jobs for finding in check(job, schema)]


def check(job: Object, schema: Object) -> list[str]:
    """Problems of one RayJob. Later layers are looked at only where the ones before are content."""
    if job.get("apiVersion") != "ray.io/v1":
        return [f"apiVersion: expected ray.io/v1, got {job.get('apiVersion')}"]
    job = copy.deepcopy(job)
    _fill(job, schema)
    validator = _validator(schema)
    found = [f"{_path(error.absolute_path)}: {error.message[:200]}" for error in validator.iter_errors(job)]
    found += _repeated(job, schema, "")
    name = job.get("metadata", {}).get("name", "")
    if not found and (len(name) > LONGEST_NAME or not NAME.fullmatch(name)):
        found.append(
            f"metadata.name: {name!r}: at most {LONGEST_NAME} lower-case letters, digits and -, a letter first"
        )
    return found or [*_of_the_server(job), *_of_the_operator(job["spec"]), *_of_the_pods(job["spec"])]


def _validator(schema: Object) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(_strict(schema))


def _strict(schema: Mapping[str, Any]) -> Object:
    """JSON Schema of an OpenAPI schema of Kubernetes: unknown fields are errors, and numbers may be texts where a
    quantity is meant."""
    if schema.get("x-kubernetes-int-or-string"):
        text = {"type": "string"} | {key: schema[key] for key in ("pattern",) if key in schema}
        return {"anyOf": [{"type": "integer"}, text]}
    strict = {key: schema[key] for key in _KEPT if key in schema}
    properties, extra = schema.get("properties"), schema.get("additionalProperties")
    if properties is not None:
        strict["properties"] = {name: _strict(part) for name, part in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict["additionalProperties"] = False
    elif isinstance(extra, dict):
        strict["additionalProperties"] = _strict(extra)
    if "items" in schema:
        strict["items"] = _strict(schema["items"])
    if schema.get("nullable") and "type" in strict:
        strict["type"] = [strict["type"], "null"]
    return strict


def _fill(value: Any, schema: Mapping[str, Any]) -> None:
    """As the server does before it validates: nulls that mean nothing go, defaults come."""
    if isinstance(value, list):
        for item in value:
            _fill(item, schema.get("items", {}))
    if not isinstance(value, dict):
        return
    properties, extra = schema.get("properties", {}), schema.get("additionalProperties")
    for name in [name for name, item in value.items() if item is None]:
        if not properties.get(name, {}).get("nullable"):
            del value[name]
    for name, part in properties.items():
        if "default" in part:
            value.setdefault(name, copy.deepcopy(part["default"]))
    for name, item in value.items():
        _fill(item, properties.get(name) or (extra if isinstance(extra, dict) else {}))


def _repeated(value: Any, schema: Mapping[str, Any], path: str) -> list[str]:
    """Items of lists that Kubernetes treats as maps, with the same key twice."""
    if isinstance(value, dict):
        parts = schema.get("properties", {})
        return [line for key in value if key in parts for line in _repeated(value[key], parts[key], f"{path}.{key}")]
    if not isinstance(value, list):
        return []
    found, seen, keys = [], set(), schema.get("x-kubernetes-list-map-keys", ())
    for index, item in enumerate(value):
        if keys and isinstance(item, dict):
            identity = tuple(item.get(key) for key in keys)
            if identity in seen:
                found.append(f"{path[1:]}[{index}]: {', '.join(map(str, identity))} is there twice")
            seen.add(identity)
        found += _repeated(item, schema.get("items", {}), f"{path}[{index}]")
    return found


def _path(parts: Any) -> str:
    return ".".join(map(str, parts)) or "the manifest"


def _of_the_server(job: Object) -> Iterator[str]:
    """Rules that are not in the schema's types."""
    for key, value in job.get("metadata", {}).get("labels", {}).items():
        if len(value) > 63 or not LABEL.fullmatch(value):
            yield f"metadata.labels.{key}: {value!r} is no value of a label"
    spec = job["spec"]
    if spec.get("managedBy") not in (None, "ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"):
        yield f"spec.managedBy: {spec['managedBy']!r} is unknown"
    strategy = spec.get("deletionStrategy", {})
    both = {"onSuccess", "onFailure"}
    if "deletionRules" in strategy:
        if both & strategy.keys():
            yield "spec.deletionStrategy: deletionRules and onSuccess, onFailure exclude each other"
        if spec.get("shutdownAfterJobFinishes") or spec.get("ttlSecondsAfterFinished"):
            yield "spec.deletionStrategy: deletionRules exclude shutdownAfterJobFinishes and ttlSecondsAfterFinished"
        for index, rule in enumerate(strategy["deletionRules"]):
            if len({"jobStatus", "jobDeploymentStatus"} & rule["condition"].keys()) != 1:
                yield f"spec.deletionStrategy.deletionRules[{index}]: one of jobStatus and jobDeploymentStatus"
    elif strategy and not both <= strategy.keys():
        yield "spec.deletionStrategy: onSuccess and onFailure, or deletionRules"


def _of_the_operator(spec: Object) -> Iterator[str]:
    ends = spec.get("shutdownAfterJobFinishes", False)
    if spec["submissionMode"] not in MODES:
        yield f"spec.submissionMode: {spec['submissionMode']!r} is none of {', '.join(MODES)}"
    if spec.get("backoffLimit", 0) < 0:
        yield "spec.backoffLimit: below 0"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(key, 1) <= 0:
            yield f"spec.{key}: not above 0"
    if spec.get("ttlSecondsAfterFinished", 0) and not ends:
        yield "spec.ttlSecondsAfterFinished: needs shutdownAfterJobFinishes: true"
    if spec.get("suspend") and not ends:
        yield "spec.suspend: needs shutdownAfterJobFinishes: true"
    cluster = spec.get("rayClusterSpec")
    if cluster is None:
        if not spec.get("clusterSelector"):
            yield "spec: neither rayClusterSpec nor clusterSelector"
        return
    if spec["submissionMode"] == "SidecarMode":
        if cluster["headGroupSpec"]["template"]["spec"].get("restartPolicy") not in (None, "Never"):
            yield "spec.rayClusterSpec.headGroupSpec: SidecarMode needs restartPolicy Never"
        for key in {"submitterPodTemplate", "submitterConfig"} & spec.keys():
            yield f"spec.{key}: not with SidecarMode"
    version = tuple(int(part) for part in re.findall(r"\d+", cluster.get("rayVersion", "0"))[:2])
    if cluster.get("authOptions", {}).get("mode") == "token" and version < (2, 52):
        yield "spec.rayClusterSpec.authOptions: a token needs rayVersion 2.52 or newer"
    names = [group["groupName"] for group in cluster.get("workerGroupSpecs", [])]
    for name in {name for name in names if names.count(name) > 1}:
        yield f"worker group {name}: there are two"
    for group in cluster.get("workerGroupSpecs", []):
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield f"worker group {group['groupName']}: replicas outside of minReplicas and maxReplicas"


def _of_the_pods(spec: Object) -> Iterator[str]:
    cluster = spec.get("rayClusterSpec")
    if cluster is None:
        return
    groups = [("head", cluster["headGroupSpec"])]
    groups += [(group["groupName"], group) for group in cluster.get("workerGroupSpecs", [])]
    for name, group in groups:
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            yield from (f"{name}/{container['name']}: {line}" for line in _of_a_container(container, volumes, group))


def _of_a_container(container: Object, volumes: set[str], group: Object) -> Iterator[str]:
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f"mounts {mount['name']}, which is no volume of the pod"
    for port in container.get("ports", []):
        if not 0 < port["containerPort"] < 65536:
            yield f"port {port['containerPort']} does not exist"
    limits, requests = (container.get("resources", {}).get(key, {}) for key in ("limits", "requests"))
    for resource, amount in limits.items():
        if "/" in resource and str(requests.get(resource, amount)) != str(amount):
            yield f"{resource}: a device's request and limit must be equal"
    told, there = group.get("rayStartParams", {}).get("num-gpus"), limits.get("nvidia.com/gpu")
    if told is not None and int(told) != int(there or 0):
        yield f"Ray is told of {told} GPUs, the pod gets {there or 0}"
