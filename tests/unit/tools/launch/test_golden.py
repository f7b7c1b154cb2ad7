"""A recipe rendered for Slurm, one for Kubernetes and one for NeMo-Run equal their golden files. After a change:

python -m tests.unit.tools.launch.test_golden    # rewrites them and launchers/; then read the diff
"""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

from grpo_mcore.recipe import MasterConfig, RecipeError, load_recipe
from grpo_mcore.tools.launch import LaunchSpec, launch_spec, nemo_run, validation
from grpo_mcore.tools.launch.kubernetes import documents, manifest
from grpo_mcore.tools.launch.kubernetes_check import bundled_schema, check, check_file
from grpo_mcore.tools.launch.slurm import BODY, sbatch_script
from tests.unit.tools.launch.jobs import CLAIM, DISAGGREGATED, H100, IMAGE, ROOT, TWO_NODES

GOLDEN = Path(__file__).parent / "golden"
ALL = sorted(
    str(file.relative_to(ROOT)) for file in (ROOT / "recipes").rglob("*.yaml") if file.parent.name != "presets"
)
ALIKE = re.compile("variants/|-lora|-1n[124]g|-async-1off|-fp8-rollouts|-pack-cp")
"""Names of recipes that differ from another one in nothing that a launcher reads."""
ON_SLURM, ON_KUBERNETES, BY_NEMO_RUN = TWO_NODES, "recipes/grpo-code-cpu.yaml", "recipes/sft.yaml"
MANIFESTS = ("k8s/grpo-2n8g.yaml", "k8s/grpo-3n8g-disaggregated.yaml")
BODY_HERE = "# (the body is grpo_mcore/tools/launch/slurm_body.sh)\n"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_a_fresh_checkout(monkeypatch)


def as_in_a_fresh_checkout(patch: pytest.MonkeyPatch) -> None:
    """Which models and data lie here depends on what was run before; test_spec.py has what is refused."""
    patch.chdir(ROOT)
    patch.setattr(validation, "models_and_data", lambda _: {})


def golden(recipe: str, suffix: str) -> Path:
    return GOLDEN / (recipe.removeprefix("recipes/").removesuffix(".yaml").replace("/", "-") + suffix)


@cache
def of_processes(recipe: str) -> tuple[str, ...]:
    """Return overrides for recipes that run in one process for a debugger: a launcher rejects them."""
    return ("cluster.backend=ray",) if load_recipe(recipe).config.cluster.backend == "local" else ()


def slurm(recipe: str) -> str:
    spec = launch_spec(load_recipe(recipe, of_processes(recipe)), "slurm")
    text = sbatch_script(spec)
    assert text.endswith(BODY.read_text())
    return plain(text, spec)


def plain(script: str, spec: LaunchSpec) -> str:
    """Leave out what has its own tests or changes with every commit and key: body, recipe and revision."""
    assert spec.recipe_yaml.rstrip() in script and f"CODE={shlex.quote(spec.code)}" in script
    script = script.replace(BODY.read_text(), BODY_HERE).replace(spec.recipe_yaml.rstrip(), "(the resolved recipe)")
    return without_revision(script)


def without_revision(script: str) -> str:
    return re.sub(r"(?m)^CODE=.*$", "CODE='(version and revision)'", script)


def through_nemo_run(recipe: str) -> str:
    """Render the values for NeMo-Run's Slurm executor, and for a recipe of one node the script for its local one."""
    loaded = load_recipe(recipe, of_processes(recipe))
    spec = launch_spec(loaded, "slurm")
    script = plain(nemo_run.script(spec, "slurm"), spec)
    parts = {"slurm executor": nemo_run.slurm_fields(spec), "slurm script": script}
    if loaded.config.cluster.num_nodes == 1:
        parts["local script"] = nemo_run.script(launch_spec(loaded, "local"), "local")
    return yaml.dump(parts, Dumper=_Blocks, sort_keys=False, width=110)


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


_Blocks.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def k8s(recipe: str, *overrides: str) -> LaunchSpec:
    return launch_spec(load_recipe(recipe, overrides or (IMAGE, CLAIM, *of_processes(recipe))), "k8s")


def without_recipe(text: str) -> str:
    """Leave the resolved recipe out: it has its own tests, and would change the golden files with every new key. So
    would its digest, the end of its ConfigMap's name."""
    text = re.sub(r"(name: [-a-z0-9]+-recipe)-[0-9a-f]{8}\n", r"\1-(digest)\n", text)
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    parts = list(yaml.safe_load_all(text))
    assert MasterConfig.model_validate(yaml.safe_load(parts[0]["data"]["recipe.yaml"]))
    parts[0]["data"]["recipe.yaml"] = "(the resolved recipe)"
    return head + yaml.safe_dump_all(parts, sort_keys=False)


def test_slurm() -> None:
    assert slurm(ON_SLURM) == golden(ON_SLURM, ".sbatch").read_text()


def test_kubernetes() -> None:
    text = manifest(k8s(ON_KUBERNETES))
    assert without_recipe(text) == golden(ON_KUBERNETES, ".k8s.yaml").read_text()
    assert check(list(yaml.safe_load_all(text))[1], bundled_schema()) == []


def test_nemo_run() -> None:
    assert through_nemo_run(BY_NEMO_RUN) == golden(BY_NEMO_RUN, ".nemo_run.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.every_state if ALIKE.search(name) else ()) for name in ALL]
)
def test_every_recipe_can_be_launched(recipe: str) -> None:
    """The example's classes are not in the image, so its recipes are refused without launch.code."""
    code = ("launch.code=[examples/sliding_puzzle]",) if "sliding-puzzle" in recipe else ()
    assert k8s(recipe, IMAGE, CLAIM, *code, *of_processes(recipe)).recipe_yaml
    if code:
        with pytest.raises(RecipeError, match=r"launch.code=\[examples/sliding_puzzle/dataset.py\]"):
            k8s(recipe)


@cache
def shipped() -> dict[str, str]:
    """Return the manifests of launchers/, which people use unchanged."""
    both = (k8s(TWO_NODES, *H100), k8s(TWO_NODES, *H100, *DISAGGREGATED))
    return dict(zip(MANIFESTS, map(manifest, both), strict=True))


@pytest.mark.parametrize("name", MANIFESTS)
def test_shipped_manifests_are_up_to_date(name: str) -> None:
    file = ROOT / "launchers" / name
    assert file.read_text() == shipped()[name]
    assert check_file(file, bundled_schema()) == []


def test_a_disaggregated_job_has_a_group_for_each_pool() -> None:
    job = documents(k8s(TWO_NODES, *H100, *DISAGGREGATED))[1]["spec"]["rayClusterSpec"]
    groups = {group["groupName"]: group["replicas"] for group in job["workerGroupSpecs"]}
    assert groups == {"policy": 1, "engines": 1}  # the head is the policy's first node


def write() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for file in GOLDEN.iterdir():
        file.unlink()
    golden(ON_SLURM, ".sbatch").write_text(slurm(ON_SLURM))
    golden(BY_NEMO_RUN, ".nemo_run.yaml").write_text(through_nemo_run(BY_NEMO_RUN))
    golden(ON_KUBERNETES, ".k8s.yaml").write_text(without_recipe(manifest(k8s(ON_KUBERNETES))))
    for name, text in shipped().items():
        (ROOT / "launchers" / name).write_text(text)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        as_in_a_fresh_checkout(patch)
        write()
