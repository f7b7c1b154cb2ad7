"""What a manifest must hold, and manifests that Kubernetes, the operator or the kubelet would refuse.

The cases and their verdicts were agreed with a real API server (Kubernetes 1.36) for all that it looks at.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.cli.main import main
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.launch import launch_spec
from grpo_mcore.tools.launch.kubernetes import documents
from grpo_mcore.tools.launch.kubernetes_check import check
from tests.unit.tools.launch.kuberay import FILE, crd
from tests.unit.tools.launch.test_golden import H100, ROOT, TWO_NODES

Job = dict[str, Any]


@pytest.fixture(scope="module")
def job() -> Job:
    return documents(launch_spec(load_recipe(str(ROOT / TWO_NODES), H100), "k8s"))[1]


def cluster(job: Job) -> Job:
    return job["spec"]["rayClusterSpec"]


def head(job: Job) -> Job:
    return cluster(job)["headGroupSpec"]


def group(job: Job) -> Job:
    return cluster(job)["workerGroupSpecs"][0]


def box(job: Job) -> Job:
    return group(job)["template"]["spec"]["containers"][0]


def set_at(where: Callable[[Job], Job], **values: Any) -> Callable[[Job], None]:
    return lambda job: where(job).update(values)


def spec(job: Job) -> Job:
    return job["spec"]


def limits(job: Job) -> Job:
    return box(job)["resources"]["limits"]


REFUSED: dict[str, Callable[[Job], Any]] = {
    "an unknown field": set_at(spec, shutDownAfterJobFinishes=True),
    "an unknown field deep down": set_at(box, imagePullpolicy="Always"),
    "a number for a text": set_at(lambda job: head(job)["rayStartParams"], **{"num-gpus": 8}),
    "no quantity": set_at(limits, cpu="8x"),
    "half a number": set_at(limits, cpu=8.5),
    "no template": lambda job: group(job).pop("template"),
    "no containers": lambda job: group(job)["template"]["spec"].pop("containers"),
    "a text for a number": set_at(spec, ttlSecondsAfterFinished="300"),
    "a number in the environment": lambda job: box(job)["env"].append({"name": "X", "value": 1}),
    "a mount without a path": lambda job: box(job)["volumeMounts"].append({"name": "shm"}),
    "an unknown way to authenticate": set_at(lambda job: cluster(job)["authOptions"], mode="password"),
    "a variable twice": lambda job: box(job)["env"].append(dict(box(job)["env"][0])),
    "an unknown manager": set_at(spec, managedBy="me"),
    "a bad label": set_at(lambda job: job["metadata"]["labels"], x="a b"),
    "a capital in the name": set_at(lambda job: job["metadata"], name="Run"),
    "no time to start": set_at(spec, preRunningDeadlineSeconds=0),
    "two ways to delete": set_at(
        spec, deletionStrategy={"onSuccess": {"policy": "DeleteSelf"}, "onFailure": {"policy": "DeleteSelf"}, "x": 1}
    ),
    "another version of the interface": set_at(lambda job: job, apiVersion="ray.io/v1alpha1"),
    # The server accepts these; the operator or the kubelet does not.
    "an unknown way to submit": set_at(spec, submissionMode="HttpMode"),
    "fewer than no retries": set_at(spec, backoffLimit=-1),
    "more than there may be": set_at(group, replicas=9),
    "no room between bounds": set_at(group, minReplicas=5),
    "two groups of a name": lambda job: cluster(job)["workerGroupSpecs"].append(copy.deepcopy(group(job))),
    "a long name": set_at(lambda job: job["metadata"], name="x" * 60),
    "a mount of nothing": lambda job: box(job)["volumeMounts"].append({"name": "nothing", "mountPath": "/x"}),
    "a port that is none": set_at(box, ports=[{"containerPort": 99999}]),
    "a device that is asked for twice": set_at(limits, **{"nvidia.com/gpu": "4"}),
    "Ray told of more GPUs": set_at(lambda job: group(job)["rayStartParams"], **{"num-gpus": "16"}),
    "kept, but with a time to go": set_at(spec, shutdownAfterJobFinishes=False),
    "a Ray without tokens": set_at(cluster, rayVersion="2.40.0"),
    "a head that comes back": set_at(lambda job: head(job)["template"]["spec"], restartPolicy="Always"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_fail_is_found(job: Job, case: str) -> None:
    wrong = copy.deepcopy(job)
    assert check(wrong, crd()) == []
    REFUSED[case](wrong)
    assert len(check(wrong, crd())) >= 1


@pytest.mark.parametrize(
    "change", [lambda job: group(job).pop("minReplicas"), set_at(spec, runtimeEnvYAML=None)], ids=["default", "null"]
)
def test_what_the_server_fills_in_is_accepted(job: Job, change: Callable[[Job], Any]) -> None:
    accepted = copy.deepcopy(job)
    change(accepted)
    assert check(accepted, crd()) == []


def test_what_an_h100_cluster_needs(job: Job) -> None:
    assert limits(job)["nvidia.com/gpu"] == "8" and limits(job)["rdma/ib"] == "8"
    assert box(job)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    volumes = {volume["name"]: volume for volume in group(job)["template"]["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Gi"}
    assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "grpo-runs"}
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training" and spec(job)["suspend"] is True
    assert spec(job)["backoffLimit"] == 3 and spec(job)["entrypoint"].endswith("--resume=auto")
    assert cluster(job)["authOptions"] == {"mode": "token"}
    assert head(job)["template"]["spec"]["containers"][0]["resources"] == box(job)["resources"]
    assert {"name": "huggingface", "key": "token"} in [
        entry["valueFrom"]["secretKeyRef"] for entry in box(job)["env"] if "valueFrom" in entry
    ]


def test_ray_may_outlive_its_head() -> None:
    redis = ("launch.k8s.gcs_redis_address=redis:6379", "launch.k8s.gcs_redis_secret=redis/password")
    job = documents(launch_spec(load_recipe(str(ROOT / TWO_NODES), [*H100, *redis]), "k8s"))[1]
    options = cluster(job)["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password"}
    assert head(job)["template"]["spec"]["restartPolicy"] == "Always"
    assert check(job, crd()) == []


@pytest.mark.slow
def test_the_command(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, none = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "none.yaml"
    good.write_text(yaml.safe_dump(job))
    bad.write_text(yaml.safe_dump(job).replace("SidecarMode", "Sidecar"))
    none.write_text("kind: Pod\n")
    crd()
    schema = ["--crd", str(FILE)]
    assert main(["launch", "k8s", "--check", str(good), *schema]) == 0
    assert main(["launch", "k8s", "--check", str(good)]) == 2
    assert main(["launch", "k8s", "--check", str(good), "--check", str(bad), "--check", str(none), *schema]) == 1
    out = capsys.readouterr().out
    assert "good.yaml: ok" in out and "'Sidecar' is none of" in out and "there is no RayJob" in out
    assert main(["launch", "slurm", TWO_NODES, "--output", str(tmp_path / "job.sh")]) == 0
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash")
    with pytest.raises(SystemExit):
        main(["launch", "nowhere", TWO_NODES])
