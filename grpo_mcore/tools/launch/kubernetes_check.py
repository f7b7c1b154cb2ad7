"""Validate RayJob manifests against KubeRay's own schema, without a cluster.

The schema does not hold the rules that the API server, KubeRay's operator and the kubelet have in code. Where a cluster
can be reached, `kubectl create --dry-run=server -f FILE` asks the server itself.
"""

import gzip
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

BUNDLED = Path(__file__).with_name("kuberay_rayjob_v1.json.gz")
"""The schema of ray.io/v1 RayJob without its descriptions: ray-project/kuberay at feeaf72 (2026-08-19), Apache-2.0."""

# Keywords that mean the same in Kubernetes' OpenAPI schemas and in JSON Schema.
_KEPT = ("enum", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems")
Object = dict[str, Any]


class CrdError(ValueError):
    """A file that does not hold KubeRay's definition of a RayJob."""


@cache
def bundled_schema() -> Object:
    """Return the schema that comes with this package."""
    return json.loads(gzip.decompress(BUNDLED.read_bytes()))


def read_crd(file: Path) -> Object:
    """Return the openAPIV3Schema of ray.io/v1 RayJob from a custom resource definition, as `kubectl get crd
    rayjobs.ray.io -o yaml` prints it, or from a file that holds only the schema. Raises CrdError."""
    try:
        schema = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CrdError(f"{file} is not readable: {error}") from error
    versions = schema.get("spec", {}).get("versions", []) if isinstance(schema, dict) else []
    for version in versions:
        if version["name"] == "v1":
            schema = version["schema"]["openAPIV3Schema"]
    if not isinstance(schema, dict) or "spec" not in schema.get("properties", {}):
        raise CrdError(f"{file} holds no schema of ray.io/v1 RayJob: kubectl get crd rayjobs.ray.io -o yaml > {file}")
    return schema


def check_file(file: Path, schema: Object) -> list[str]:
    """Return a line for each problem of the RayJobs in a file; a file without one is a problem. `schema` is as
    `read_crd` returns it."""
    try:
        documents = [
            document for document in yaml.safe_load_all(file.read_text(encoding="utf-8")) if document is not None
        ]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"  not readable: {error}"]
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == "RayJob"]
    if not jobs:
        return ["  there is no RayJob in it"]
    return [f"  {problem}" for job in jobs for problem in check(job, schema)]


def check(job: Object, schema: Object) -> list[str]:
    """Return the problems of one RayJob."""
    from jsonschema import Draft202012Validator

    if job.get("apiVersion") != "ray.io/v1":
        return [f"apiVersion: expected ray.io/v1, got {job.get('apiVersion')}"]
    errors = Draft202012Validator(_json_schema(schema)).iter_errors(job)
    return [f"{'.'.join(map(str, error.absolute_path)) or 'the manifest'}: {error.message[:200]}" for error in errors]


def _json_schema(schema: Mapping[str, Any]) -> Object:
    """Translate an OpenAPI schema of Kubernetes: unknown fields are errors, null means that a field is absent, a field
    with a default may be absent, and a quantity may be an integer or a text."""
    strict = {key: schema[key] for key in _KEPT if key in schema}
    properties, extra = schema.get("properties"), schema.get("additionalProperties")
    if schema.get("x-kubernetes-int-or-string"):
        strict["type"] = ["integer", "string", "null"]
    elif "type" in schema:
        strict["type"] = [schema["type"], "null"]
    if properties is not None:
        strict["properties"] = {name: _json_schema(part) for name, part in properties.items()}
        strict["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        strict["required"] = [name for name in schema.get("required", ()) if "default" not in properties.get(name, {})]
    elif isinstance(extra, dict):
        strict["additionalProperties"] = _json_schema(extra)
    if "items" in schema:
        strict["items"] = _json_schema(schema["items"])
    return strict
