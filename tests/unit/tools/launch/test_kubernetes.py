"""The manifests hold what a cluster needs, and the check finds what KubeRay's schema forbids."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mcore.cli.main import main
from grpo_mcore.observe.alarms import KINDS
from grpo_mcore.recipe import RecipeError, load_recipe
from grpo_mcore.tools.launch import launch_spec
from grpo_mcore.tools.launch.kubernetes import _Dumper, documents, manifest
from grpo_mcore.tools.launch.kubernetes_check import bundled_schema, check
from tests.unit.tools.launch.jobs import DISAGGREGATED, H100, ROOT, TWO_NODES

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
    "another version of the interface": set_at(lambda job: job, apiVersion="ray.io/v1alpha1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_schema_forbids_is_found(job: Job, case: str) -> None:
    wrong = copy.deepcopy(job)
    assert check(wrong, bundled_schema()) == []
    REFUSED[case](wrong)
    assert len(check(wrong, bundled_schema())) >= 1


@pytest.mark.parametrize(
    "change", [lambda job: group(job).pop("minReplicas"), set_at(spec, runtimeEnvYAML=None)], ids=["default", "null"]
)
def test_what_the_server_fills_in_is_accepted(job: Job, change: Callable[[Job], Any]) -> None:
    accepted = copy.deepcopy(job)
    change(accepted)
    assert check(accepted, bundled_schema()) == []


@pytest.mark.parametrize("overrides", [(), DISAGGREGATED])
def test_the_rules_that_the_schema_does_not_hold(overrides: tuple[str, ...]) -> None:
    """The operator and the kubelet would reject the job, or its pods, only later."""
    job = documents(launch_spec(load_recipe(str(ROOT / TWO_NODES), [*H100, *overrides]), "k8s"))[1]
    assert len(job["metadata"]["name"]) <= 47, "the operator makes the names of services and pods from it"
    assert spec(job)["submissionMode"] == "SidecarMode"
    assert head(job)["template"]["spec"]["restartPolicy"] == "Never", "SidecarMode needs it"
    groups = cluster(job)["workerGroupSpecs"]
    assert len({each["groupName"] for each in groups}) == len(groups)
    assert all(each["minReplicas"] == each["replicas"] == each["maxReplicas"] for each in groups)
    for each in (head(job), *groups):
        pod = each["template"]["spec"]
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == each["rayStartParams"]["num-gpus"]


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


def test_what_a_site_adds_reaches_all_pods_as_it_is_written() -> None:
    words = [
        "launch.k8s.tolerations=[{key: reserved, operator: Equal, value: rl, effect: NoSchedule}]",
        "launch.k8s.affinity={podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: "
        "[{topologyKey: rack, labelSelector: {matchLabels: {team: rl}}}]}}",
        "launch.k8s.annotations={sidecar.istio.io/inject: 'false'}",
        "launch.k8s.volumes={/scratch: {hostPath: {path: /local}}}",
        "launch.k8s.run_as_user=4000",
    ]
    written = documents(launch_spec(load_recipe(str(ROOT / TWO_NODES), [*H100, *words]), "k8s"))
    assert not check(written[1], bundled_schema())
    for template in (head(written[1])["template"], group(written[1])["template"]):
        pod = template["spec"]
        assert template["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
        assert [toleration["key"] for toleration in pod["tolerations"]] == ["nvidia.com/gpu", "reserved"]
        assert pod["affinity"]["podAffinity"] and pod["securityContext"]["runAsUser"] == 4000
        assert pod["volumes"][-1] == {"name": "volume-0", "hostPath": {"path": "/local"}}
        assert pod["containers"][0]["volumeMounts"][-1] == {"name": "volume-0", "mountPath": "/scratch"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("launch.k8s.tolerations=[{kee: x}]", "kee"),
        ("launch.time_limit=4h", 'expected "HH:MM:SS" or "D-HH:MM:SS", such as "04:00:00", got \'4h\''),
    ],
)
def test_what_kubernetes_would_refuse_is_said_at_once(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "k8s", str(ROOT / TWO_NODES), "--dry-run", *H100, word]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out


def test_other_readers_of_yaml_take_texts_for_texts() -> None:
    texts = ["y", "No", "1e5", "0o17", "08", "1e-3", "0x1", ".5", "~", "", "null", "a: b", "1:30", "a #b", "é"]
    words = ("ray-head", "/data/runs", "kueue.x-k8s.io/queue-name")
    written = yaml.dump([*texts, *words], Dumper=_Dumper, width=110)
    assert yaml.safe_load(written) == [*texts, *words]
    lines = written.splitlines()
    assert all(line.endswith(("'", '"')) for line in lines[: len(texts)]), lines
    assert lines[len(texts) :] == [f"- {word}" for word in words]


def test_ray_may_outlive_its_head() -> None:
    redis = ("launch.k8s.gcs_redis_address=redis:6379", "launch.k8s.gcs_redis_secret=redis/password")
    job = documents(launch_spec(load_recipe(str(ROOT / TWO_NODES), [*H100, *redis]), "k8s"))[1]
    options = cluster(job)["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password"}
    assert head(job)["template"]["spec"]["restartPolicy"] == "Always"
    assert check(job, bundled_schema()) == []


@pytest.mark.slow
def test_the_command(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, none = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "none.yaml"
    good.write_text(yaml.safe_dump(job))
    bad.write_text(yaml.safe_dump(job).replace("backoffLimit: 3", "backoffLimit: three"))
    none.write_text("kind: Pod\n")
    own = tmp_path / "crd.yaml"
    own.write_text(json.dumps(bundled_schema()))
    schema = ["--crd", str(own)]
    assert main(["launch", "k8s", "--check", str(good), *schema]) == 0
    assert main(["launch", "k8s", "--check", str(good), "--check", str(bad), "--check", str(none)]) == 1
    out = capsys.readouterr().out
    assert "good.yaml: ok" in out and "spec.backoffLimit: 'three' is not of type" in out
    assert "--dry-run=server" in out and "there is no RayJob" in out
    assert main(["launch", "slurm", TWO_NODES, "--output", str(tmp_path / "job.sh")]) == 0
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash")
    with pytest.raises(SystemExit):
        main(["launch", "nowhere", TWO_NODES])


def test_files_that_are_no_text_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "job.yaml").write_bytes("kind: RayJob".encode("utf-16"))
    assert main(["launch", "k8s", "--check", str(file)]) == 1
    assert "not readable: 'utf-8' codec" in capsys.readouterr().out
    assert main(["launch", "k8s", "--check", str(file), "--crd", str(file)]) == 1
    assert f"{file} is not readable" in capsys.readouterr().err


def test_a_recipe_that_differs_has_a_configmap_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """kubectl creates the RayJob also where the ConfigMap exists, of a job that was deleted: it trained that one's
    recipe. One with the same content does no harm."""
    made = [
        documents(launch_spec(load_recipe(str(ROOT / TWO_NODES), [*H100, *more]), "k8s"))
        for more in ((), ("grpo.seed=7",))
    ]
    names = [recipe["metadata"]["name"] for recipe, *_ in made]
    assert names[0] != names[1]
    for name, (_, job, *_) in zip(names, made, strict=True):
        assert box(job)["volumeMounts"][0]["name"] == "recipe"
        assert group(job)["template"]["spec"]["volumes"][0]["configMap"]["name"] == name
    kubectl = tmp_path / "kubectl"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    # As kubectl does it: what could be made, and 1. A job's name may contain "rayjob".
    for created, code in (("rayjob.ray.io/x", 0), ("configmap/x", 1), ("configmap/my-rayjob.v2-recipe-1", 1)):
        kubectl.write_text(f"#!/bin/sh\ncat >/dev/null; echo {created}; echo AlreadyExists >&2; exit 1\n")
        kubectl.chmod(0o755)
        assert main(["launch", "k8s", str(ROOT / TWO_NODES), *H100]) == code
        told = capfd.readouterr()
        assert created in told.out and "AlreadyExists" in told.err
    there = 'Error from server (AlreadyExists): error when creating "STDIN": rayjobs.ray.io "x-1" already exists'
    kubectl.write_text(f"#!/bin/sh\ncat >/dev/null; echo '{there}' >&2; exit 1\n")
    assert main(["launch", "k8s", str(ROOT / TWO_NODES), *H100]) == 1
    assert "kubectl delete rayjob x-1 if that one has ended, or launch.name=ANOTHER" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("env", "profile"),
    [
        ("{math: {}}", "RuntimeDefault"),
        ("{math: {}, code: {}}", "Unconfined"),
        ("{math: {}, programs: {environment: code}}", "Unconfined"),
        ("{math: {}, code: {sandbox: none_i_trust_the_code}}", "RuntimeDefault"),
    ],
)
def test_pods_have_a_system_call_filter_unless_they_hold_sandboxes(env: str, profile: str) -> None:
    recipe = load_recipe(str(ROOT / TWO_NODES), [*H100, f"env={env}"])
    job = documents(launch_spec(recipe, "k8s"))[1]
    for part in (head(job), group(job)):
        security = part["template"]["spec"]["securityContext"]
        assert security["seccompProfile"] == {"type": profile} and security["runAsNonRoot"]


def rendered(*words: str) -> list[dict[str, Any]]:
    return documents(launch_spec(load_recipe(str(ROOT / TWO_NODES), [*H100, *words]), "k8s"))


def test_a_network_policy_guards_the_pods_of_the_job() -> None:
    _, job, policy = rendered("launch.name=train-7")
    spec = policy["spec"]
    assert policy["kind"] == "NetworkPolicy" and spec["policyTypes"] == ["Ingress"]
    label = {"grpo-mcore/job": "train-7"}
    assert spec["podSelector"] == {"matchLabels": label}
    assert all(template["metadata"]["labels"] == label for template in (head(job)["template"], group(job)["template"]))
    from_pods, from_cluster = spec["ingress"]
    assert from_pods == {"from": [{"podSelector": {"matchLabels": label}}]}
    assert [port["port"] for port in from_cluster["ports"]] == [8265], "the operator asks Ray's dashboard for the job"
    assert len(rendered("launch.k8s.network_policy=false")) == 2


def test_prometheus_finds_the_drivers_pod() -> None:
    served = ("logger.prometheus_enabled=true", "logger.prometheus.host=0.0.0.0", "logger.prometheus.port=9500")
    _, _, policy, monitor = rendered(*served, "launch.k8s.pod_monitor=true")
    assert [port["port"] for port in policy["spec"]["ingress"][1]["ports"]] == [8265, 9500]
    assert monitor["kind"] == "PodMonitor" and monitor["spec"]["podMetricsEndpoints"] == [{"portNumber": 9500}]
    assert monitor["spec"]["selector"]["matchLabels"]["ray.io/node-type"] == "head"
    with pytest.raises(RecipeError, match=r"nobody outside the pod reaches this; 0.0.0.0 listens to the cluster"):
        rendered("logger.prometheus_enabled=true")
    with pytest.raises(RecipeError, match="there are no metrics to take"):
        rendered("launch.k8s.pod_monitor=true")


@pytest.mark.parametrize(
    ("words", "level"),
    [
        (("launch.k8s.rdma_resource=null",), "restricted"),
        ((), "privileged (launch.k8s.rdma_resource adds IPC_LOCK)"),
        (("launch.k8s.rdma_resource=null", "launch.k8s.host_network=true"), "privileged (launch.k8s.host_network)"),
    ],
)
def test_the_manifest_names_the_pod_security_level(words: tuple[str, ...], level: str) -> None:
    spec = launch_spec(load_recipe(str(ROOT / TWO_NODES), [*H100, *words]), "k8s")
    assert f"# Pod Security level of its pods: {level}\n" in manifest(spec)
    for template in (head(documents(spec)[1])["template"], group(documents(spec)[1])["template"]):
        (container,) = template["spec"]["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_the_alert_rules_are_those_of_the_table_of_alarms() -> None:
    (group_of_rules,) = yaml.safe_load((ROOT / "launchers/k8s/alerts.yaml").read_text())["spec"]["groups"]
    rules = {rule["alert"]: rule for rule in group_of_rules["rules"]}
    raised = {name: kind for name, kind in KINDS.items() if kind.by == "run"}
    assert set(rules) == {*raised, "no_step", "no_metrics"}
    for name, kind in raised.items():
        assert rules[name]["expr"] == f"grpo_mcore_alarm_{name} > 0"
        assert rules[name]["annotations"] == {"summary": kind.when, "description": f"First: {kind.first}"}
