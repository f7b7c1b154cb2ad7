"""A recipe becomes a job, and recipes that no cluster would run are rejected."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from grpo_mcore.cli.main import main
from grpo_mcore.cluster.ray_node import ENDED_BY_ITSELF
from grpo_mcore.recipe import MasterConfig, RecipeError, load_recipe
from grpo_mcore.tools.launch import LaunchSpec, Pool, launch_spec, validation
from grpo_mcore.tools.launch.kubernetes import documents
from grpo_mcore.tools.launch.kubernetes_check import bundled_schema, check
from grpo_mcore.tools.launch.slurm import BODY, job_script, sbatch_options, sbatch_script
from grpo_mcore.tools.launch.spec import job_name, planned
from grpo_mcore.tools.launch.validation import seconds

TWO_NODES = "grpo-llama3.1-8B-2n8g"
ON_K8S = ("launch.container=ghcr.io/you/grpo-mcore:0.1", "launch.k8s.volume_claim=runs")


def spec(*overrides: str, recipe: str = TWO_NODES, target: str = "slurm") -> LaunchSpec:
    return launch_spec(load_recipe(recipe, overrides), target)  # type: ignore[arg-type]


def test_a_recipe_says_it_all() -> None:
    found = spec("grpo.max_num_steps=7", "launch.time_limit=1-02:03:04", "cluster.env_vars=[MY_SITE]")
    assert found.name == "grpo-llama3-1-8b-2n8g"
    assert found.pools == (Pool("workers", 2, 8),) and found.nodes == 2
    assert {"MY_SITE", "HF_TOKEN", "HF_DATASETS_OFFLINE", "SSL_CERT_FILE"} <= {*found.from_submitter}
    assert "AWS_SECRET_ACCESS_KEY" not in found.from_submitter
    assert "AWS_SECRET_ACCESS_KEY" in spec("checkpointing.mirror=s3://bucket/run").from_submitter
    assert not {"WANDB_MODE", "MLFLOW_TRACKING_URI", "SWANLAB_API_KEY"} & {*found.from_submitter}
    tracked = spec(*(f"logger.{name}_enabled=true" for name in ("wandb", "mlflow", "swanlab"))).from_submitter
    assert {"WANDB_MODE", "MLFLOW_TRACKING_URI", "SWANLAB_API_KEY"} <= {*tracked}
    assert found.overrides == ("grpo.max_num_steps=7", "cluster.env_vars=[MY_SITE]")
    valued = spec("cluster.env_vars={MY_SITE: null, OMP_NUM_THREADS: 3}")
    assert valued.variables == {"OMP_NUM_THREADS": "3"} and "OMP_NUM_THREADS" not in valued.from_submitter
    assert found.command("r.yaml", ("a.b=c",)) == ("grpo-mcore", "train", "r.yaml", "a.b=c", "--resume=auto")


def test_the_recipe_travels_whole() -> None:
    found = spec("grpo.max_num_steps=7")
    config = MasterConfig.model_validate(yaml.safe_load(found.recipe_yaml))
    wanted = load_recipe(TWO_NODES, ["grpo.max_num_steps=7"]).config
    assert config.model_dump(exclude={"launch"}) == wanted.model_dump(exclude={"launch"})
    assert [name for name, _ in spec(*ON_K8S, target="k8s").texts] == ["recipes/prompts/cot.txt"]


def test_what_cannot_resume_is_not_restarted() -> None:
    assert spec().restarts == 3
    assert spec("checkpointing.enabled=false").restarts == 0
    found = spec(recipe="sft")
    assert (found.verb, found.restarts) == ("sft", 3)
    assert found.command("x") == ("grpo-mcore", "sft", "x", "--resume=auto")


def test_on_cpu_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # not where `make demo` has left its model, which is on one machine only
    assert spec(recipe="grpo-arithmetic-cpu").pools == (Pool("workers", 1, 0),)


def test_no_value_of_a_secret_is_in_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    found = spec("launch.k8s.secrets={HF_TOKEN: hf/token}", *ON_K8S, target="k8s")
    assert "verysecret" not in repr([getattr(found, field.name) for field in fields(found)])


@pytest.mark.parametrize(
    ("text", "value"), [("00:10:00", 600), ("1-02:03:04", 93784), ("120:00:01", 432001), ("2-00:00:00", 172800)]
)
def test_times(text: str, value: int) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("stem", ["grpo_math_1B", "2n8g", "A.B..C", "x" * 90])
def test_names(stem: str) -> None:
    name = job_name(stem)
    assert 0 < len(name) <= 40 and name[0].isalpha() and name == name.lower() and name[-1].isalnum()


# (where, overrides, the key that is named, part of the message)
WRONG = {
    "no image": ("k8s", ["launch.k8s.volume_claim=c"], "launch.container", "needs an image"),
    "an image that changes": ("k8s", ["launch.container=a/b:latest"], "launch.container", "another image"),
    "an image without a tag": ("k8s", ["launch.container=host:5000/b"], "launch.container", "another image"),
    "a Slurm image file": ("k8s", ["launch.container=a:b.sqsh"], "launch.container", "not the name of an image"),
    "engines over nodes":
        ("slurm", ["policy.generation.vllm_cfg.tensor_parallel_size=3"],
         "policy.generation.vllm_cfg.tensor_parallel_size", "3 ranks of an engine"),
    "policy over nodes":
        ("slurm",
         ["policy.megatron_cfg.tensor_model_parallel_size=16", "policy.megatron_cfg.pipeline_model_parallel_size=1"],
         "policy.megatron_cfg.tensor_model_parallel_size", "the policy's tensor-parallel groups"),
    "checkpoints on one node":
        ("slurm", ["checkpointing.checkpoint_dir=/tmp/x"], "checkpointing.checkpoint_dir", "one"),
    "checkpoints in the container":
        ("slurm", ["launch.container=i:1", "checkpointing.checkpoint_dir=/runs/x", "launch.mounts=['/data:/data']"],
         "checkpointing.checkpoint_dir", "mount a shared folder"),
    "a read-only mount":
        ("slurm",
         ["launch.container=i:1", "checkpointing.checkpoint_dir=/runs/x", "launch.mounts=['/runs:/runs:ro+rprivate']"],
         "checkpointing.checkpoint_dir", "mount a shared folder"),
    "no volume": ("k8s", ["launch.container=a/b:1"], "checkpointing.checkpoint_dir", "volume_claim"),
    "checkpoints beside the volume":
        ("k8s", [*ON_K8S, "checkpointing.checkpoint_dir=/data/x"], "checkpointing.checkpoint_dir",
         "not on the shared volume"),
    "no time": ("slurm", ["launch.time_limit=00:15:00"], "launch.time_limit", "no time to train"),
    "a signal too early":
        ("slurm", ["launch.save_before_end_s=70000", "launch.time_limit=3-00:00:00"], "launch.save_before_end_s",
         "at most 65535 s before the limit"),
    "not a time": ("slurm", ["launch.time_limit=4h"], "launch.time_limit", "4h"),
    "a variable of ours": ("slurm", ["+launch.env.RAY_ADDRESS=x"], "cluster.env_vars.RAY_ADDRESS", "launcher itself"),
    "half a mount": ("slurm", ["launch.container=i:1", "launch.mounts=['/a']"], "launch.mounts", "FROM:TO"),
    "a pattern of variables": ("slurm", ["cluster.env_vars=[MY_*]"], "cluster.env_vars", "names of variables only"),
    "a comma in a mount": ("slurm", ["launch.container=i:1", "launch.mounts=['/a,b:/x']"], "launch.mounts", "commas"),
    "a relative mount": ("slurm", ["launch.container=i:1", "launch.mounts=['/a:b']"], "launch.mounts", "absolute"),
    "a mount from a relative folder":
        ("slurm", ["launch.container=i:1", "launch.mounts=['data:/a']"], "launch.mounts", "absolute"),
    "a copy that the container would lose":
        ("slurm", ["launch.container=i:1", "launch.stage_to=/local"], "launch.stage_to",
         "/local:/local to launch.mounts"),
    "a copy on no volume": ("k8s", [*ON_K8S, "launch.stage_to=/local"], "launch.stage_to", "is on no volume"),
    "mounts without container": ("slurm", ["launch.mounts=['/a:/x']"], "launch.mounts", "bare metal"),
    "nodes twice": ("slurm", ["launch.slurm.options=['--nodes=9']"], "launch.slurm.options", "follows from the recipe"),
    "an option that is a line":
        ("slurm", ['launch.slurm.options=["--qos=high\\nrm -r x"]'], "launch.slurm.options", "one long option"),
    "an account that is a line":
        ("slurm", ['launch.slurm.account="a\\nrm -r x"'], "launch.slurm.account", "a name without spaces"),
    "other GPUs":
        ("slurm", ["launch.slurm.options=['--gres=nvme:1,gpu:h100:4']"], "launch.slurm.options",
         "gpu:h100:4: the recipe asks for 8 GPUs in each node (cluster.gpus_per_node)"),
    "not an option": ("slurm", ["launch.slurm.options=['-N 9']"], "launch.slurm.options", "one long option"),
    "a bad secret": ("k8s", [*ON_K8S, "+launch.k8s.secrets.HF_TOKEN=hf_abc"], "launch.k8s.secrets.HF_TOKEN", "SECRET/"),
    "a bad claim": ("k8s", ["launch.k8s.volume_claim=My_Claim"], "launch.k8s.volume_claim", "a Kubernetes name"),
    "a secret for a variable of Ray":
        ("k8s", [*ON_K8S, "+launch.k8s.secrets.RAY_AUTH_TOKEN=a/b"], "launch.k8s.secrets",
         "RAY_AUTH_TOKEN is no variable"),
    "a long namespace": ("k8s", [*ON_K8S, f"launch.k8s.namespace={'n' * 64}"], "launch.k8s.namespace", "at most 63"),
    "a path as a queue":
        ("k8s", [*ON_K8S, "launch.k8s.scheduler=kueue", "launch.k8s.queue=team/gpu"], "launch.k8s.queue",
         "at most 63 letters, digits"),
    "a long priority":
        ("k8s", [*ON_K8S, f"launch.k8s.priority_class={'p' * 64}"], "launch.k8s.priority_class", "at most 63"),
    "a colon in a mount point":
        ("k8s", [*ON_K8S, "launch.k8s.volume_path=/a:b", "checkpointing.checkpoint_dir=x"], "launch.k8s.volume_path",
         "without a colon"),
    "a bad device": ("k8s", [*ON_K8S, "launch.k8s.rdma_resource=ib"], "launch.k8s.rdma_resource", "DOMAIN/NAME"),
    "no queue": ("k8s", [*ON_K8S, "launch.k8s.scheduler=kueue"], "launch.k8s.scheduler", "needs launch.k8s.queue"),
    "no scheduler": ("k8s", [*ON_K8S, "launch.k8s.queue=q"], "launch.k8s.queue", "needs launch.k8s.scheduler"),
    "too much shared memory": ("k8s", [*ON_K8S, "launch.k8s.shm_gb=600"], "launch.k8s.shm_gb", "more than half"),
    "one process": ("slurm", ["cluster.backend=local", "cluster.num_nodes=1"], "cluster.backend", "local"),
    "a bad name": ("slurm", ["launch.name=My_Run"], "launch.name", "My_Run"),
}  # fmt: skip


def test_engines_of_whole_nodes_are_allowed() -> None:
    spec("policy.generation.vllm_cfg.tensor_parallel_size=16", target="slurm")


@pytest.mark.parametrize("case", WRONG)
def test_wrong_recipes_are_refused(case: str) -> None:
    target, overrides, key, text = WRONG[case]
    with pytest.raises(RecipeError) as caught:
        spec(*overrides, target=target)
    assert [p for p in caught.value.problems if p.key == key and text in p.message], caught.value


def test_a_refusal_names_the_line() -> None:
    with pytest.raises(RecipeError, match=r"recipes/grpo-llama3.1-8B-2n8g.yaml:\d+: checkpointing.checkpoint_dir"):
        spec("launch.container=a/b:1", target="k8s")


def test_rendering_needs_no_torch() -> None:
    code = "import sys, grpo_mcore.tools.launch; print(sorted({'torch', 'ray'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


def test_custom_code_travels_to_kubernetes_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rewards.py").write_text("def score(response): return 1.0\n")
    (tmp_path / "mine" / "table.bin").write_bytes(b"\xff\xfe")
    reward = "env={own: {environment: rules, components: {a: {type: function, path: 'mine.rewards:score'}}}}"
    words = (
        "~env.math",
        reward,
        "data.default={env_name: own, prompt_file: null}",
        "data.train.system_prompt_file=null",
    )

    def problems(*more: str, target: str = "k8s") -> str:
        with pytest.raises(RecipeError) as error:
            spec(*words, *more, *(ON_K8S if target == "k8s" else ()), target=target)
        return str(error.value)

    assert "mine/rewards.py is on this machine only: let it travel with launch.code=[mine/rewards.py]" in problems()
    assert "mine/table.bin is no UTF-8 text" in problems("launch.code=[mine]")
    assert "there is no your.py" in problems("launch.code=[mine/rewards.py, your.py]")
    assert "/etc/x.py is not below the working directory" in problems("launch.code=[/etc/x.py, mine/rewards.py]")
    assert f"the job runs in {tmp_path}, which the container must see and write: add {tmp_path}:{tmp_path}" in problems(
        "launch.code=[mine]", "launch.container=a:1", target="slurm"
    ), "relative paths, such as that of the checkpoints, would be lost with the container"
    found = spec(*words, "launch.code=[mine/rewards.py]", *ON_K8S, target="k8s")
    assert ("mine/rewards.py", "def score(response): return 1.0\n") in found.texts
    config_map, job, *_ = documents(found)
    assert "def score(response): return 1.0\n" in config_map["data"].values()
    assert "{'name': 'PYTHONPATH', 'value': '/etc/grpo-mcore'}" in str(job) and check(job, bundled_schema()) == []


def test_data_and_models_of_this_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text("{}\n")
    words = (
        *("data.train={dataset_name: ResponseDataset, data_path: train.jsonl}", "policy.model_name=model"),
        "data.default.prompt_file=null",
    )

    def problems(*more: str, target: str) -> str:
        with pytest.raises(RecipeError) as error:
            spec(*words, *more, target=target)
        said = str(error.value)
        count = 2 + ("the job runs in" in said)
        assert said.startswith(f"{count} problems"), "the tokenizer is in the model's folder"
        return said

    said = problems(*ON_K8S, target="k8s")
    assert f"policy.model_name: {tmp_path}/model is on this machine only: copy it to the volume" in said
    assert "train.jsonl" in said and "name it there, /" in said
    monkeypatch.setattr(validation, "NODE_LOCAL", ("/scratch",))
    container = ("launch.container=a:1", "checkpointing.enabled=false")
    said = problems(*container, target="slurm")
    assert f"the container does not see {tmp_path}/train.jsonl: add {tmp_path}:{tmp_path} to launch.mounts" in said
    assert spec(*words, *container, f"launch.mounts=['{tmp_path}:{tmp_path}']", target="slurm").nodes
    monkeypatch.setattr(validation, "NODE_LOCAL", (str(tmp_path),))
    assert "/model is on this node only; put it on the shared file system" in problems(target="slurm")
    monkeypatch.setattr(validation, "NODE_LOCAL", ("/",))
    assert spec("checkpointing.enabled=false", target="slurm").nodes, "its prompt is where the code is"


def test_text_files_travel_to_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for file in (here / "my.jinja", here / "é.txt", tmp_path / "up.txt"):
        file.write_text(f"ü {{}} {file.name}", encoding="utf-8")

    def found(template: str, prompt: str) -> LaunchSpec:
        words = (f"policy.tokenizer.chat_template='{template}'", f"data.train.prompt_file='{prompt}'")
        none = ("data.train.system_prompt_file=null", "data.default.prompt_file=null")
        return spec(*words, *none, *ON_K8S, target="k8s")

    carried = found("my.jinja", "é.txt")
    assert carried.texts == (("my.jinja", "ü {} my.jinja"), ("é.txt", "ü {} é.txt"))
    assert "\n    chat_template: /etc/grpo-mcore/my.jinja\n" in carried.recipe_yaml
    assert 'prompt_file: "/etc/grpo-mcore/' not in (yaml := carried.recipe_yaml) and "/etc/grpo-mcore/é.txt" in yaml
    dotted = spec(*ON_K8S, f"++eval.sets={{a.b: {{prompt_file: {tmp_path}/up.txt}}}}", "eval.k_value=1", target="k8s")
    assert f"texts{tmp_path}/up.txt" in dict(dotted.texts)
    elsewhere = found(f"{here}/my.jinja", "../up.txt")
    assert elsewhere.texts == ((f"texts{here}/my.jinja", "ü {} my.jinja"), (f"texts{tmp_path}/up.txt", "ü {} up.txt"))
    assert f"prompt_file: /etc/grpo-mcore/texts{tmp_path}/up.txt\n" in elsewhere.recipe_yaml
    shipped = spec(*ON_K8S, target="k8s")  # outside a checkout, the package's own file
    assert [name.endswith("/prompts/cot.txt") for name, _ in shipped.texts] == [True]
    (here / "é.txt").write_bytes(b"\xfc" * 2)
    with pytest.raises(RecipeError, match="prompt_file: é.txt is no UTF-8 text"):
        found("my.jinja", "é.txt")
    (here / "é.txt").write_text("ü" * 500_000, encoding="utf-8")
    with pytest.raises(RecipeError, match="1.0 MB do not fit into a ConfigMap"):
        found("my.jinja", "é.txt")


def test_containers_see_the_text_files_and_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("{}")
    words = ("data.train.prompt_file=my.txt", "launch.container=i:1", "checkpointing.enabled=false")
    with pytest.raises(RecipeError, match=f"the container does not see {tmp_path}/my.txt: add"):
        with monkeypatch.context() as patch:
            patch.setattr(validation, "NODE_LOCAL", ())
            spec(*words)
    start, body = "inside=()\nif", BODY.read_text()
    part = body[body.index(start) : body.index("    inside=(--container")] + "fi; echo fine"
    for folder, code in (("/a b", 0), ("/a,b", 1)):
        program = f"say() {{ echo $*; }}; CONTAINER=i:1; logs='{folder}'; {part}"
        assert subprocess.run(["bash", "-uc", program], timeout=60, capture_output=True).returncode == code


def test_options_of_the_site_replace_ours() -> None:
    """sbatch refuses --mem beside --mem-per-cpu."""
    options = sbatch_options(spec("launch.slurm.options=['--mem-per-cpu=4G', '--no-requeue', '--job-name=mine']",
                                  target="slurm"))  # fmt: skip
    assert not options.keys() & {"mem", "requeue", "job-name"} and options["cpus-per-task"] == 64


@pytest.mark.parametrize(
    "option", ["--gres=gpu:h100:8", "--gpus-per-node=h100:8", "--gres=nvme:1,gpu:8", "--gres=gpu:8"]
)
def test_the_kind_of_gpu_may_be_named(option: str) -> None:
    lines = sbatch_script(spec(f"launch.slurm.options=['{option}']")).splitlines()
    assert [line for line in lines if "SBATCH --g" in line] == [f"#SBATCH {option}"]
    both = sbatch_options(spec("launch.slurm.options=['--gres=lscratch:200']"))
    assert both["gpus-per-node"] == 8


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--comment=my run #2", '--comment="my run #2"'),
        ("--comment=\"my 'run'\"", "--comment=\"my 'run'\""),
        ("--comment=it's", '--comment="it\'s"'),
        ("--qos high", "--qos=high"),
        ("--exclude=node[001-003,007]", "--exclude=node[001-003,007]"),
        ("--exclusive", "--exclusive"),
    ],
)
def test_options_with_spaces_reach_sbatch_whole(option: str, line: str) -> None:
    """An unquoted # starts a comment there: what follows was lost without a word."""
    words = "launch.slurm.options=[" + json.dumps(option) + "]"
    assert f"#SBATCH {line}" in sbatch_script(spec(words)).splitlines()


def test_a_line_break_in_the_name_of_a_recipe_stays_in_its_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path("recipes/grpo-llama3.1-8B-2n8g.yaml").read_text()
    monkeypatch.chdir(tmp_path)
    Path("a\nb.yaml").write_text(source)
    script = sbatch_script(launch_spec(load_recipe("a\nb.yaml", ()), "slurm"))
    assert script.splitlines()[1].startswith("# a b.yaml on Slurm") and "\nb.yaml" not in script


def test_a_variable_of_the_recipe_is_not_replaced_on_kubernetes() -> None:
    pod = documents(spec(*ON_K8S, "launch.env={HF_HOME: /cache}", target="k8s"))[1]["spec"]["rayClusterSpec"]
    variables = pod["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert [one["value"] for one in variables if one["name"] == "HF_HOME"] == ["/cache"]


@pytest.mark.parametrize(("scheduler", "limited"), [("kueue", True), ("volcano", False), ("kai", False)])
def test_a_job_may_wait_in_its_queue(scheduler: str, limited: bool) -> None:
    """KubeRay counts pods that are pending as starting: the job was given up after 90 minutes."""
    words = (f"launch.k8s.scheduler={scheduler}", "launch.k8s.queue=q")
    job = documents(spec(*ON_K8S, *words, target="k8s"))[1]
    assert ("preRunningDeadlineSeconds" in job["spec"]) == limited and check(job, bundled_schema()) == []


def test_variables_reach_the_pods_as_they_are() -> None:
    """Kubernetes reads $$ as $, and $(NAME) as another variable; a secret takes the place of a default."""
    words = ("launch.env={NCCL_A: 'a$$b $(HOME) $c'}", "launch.k8s.secrets={HF_HOME: a/b}")
    pod = documents(spec(*ON_K8S, *words, target="k8s"))[1]["spec"]["rayClusterSpec"]
    variables = pod["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    values = {one["name"]: one.get("value") for one in variables}
    assert values["NCCL_A"] == "a$$$$b $$(HOME) $$c" and values["HF_HOME"] is None
    assert len(variables) == len(values)


def test_the_job_script_trains_the_recipe_that_was_submitted(tmp_path: Path) -> None:
    """Also where the recipe has quotes, dollars and the line that would end it."""
    job = spec("policy.generation.stop_strings=['$(date)', 'END_OF_RECIPE', '`x`']", target="slurm")
    tail = f"{job.recipe_yaml}END_OF_RECIPE\n"
    script = job_script(replace(job, recipe_yaml=tail)).replace(BODY.read_text(), 'resolved_recipe; eval "$COMMAND"\n')
    (tmp_path / "grpo-mcore").write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    (tmp_path / "grpo-mcore").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECIPE": "/logs/a recipe.yaml"}
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{tail}<train></logs/a recipe.yaml><--resume=auto>", done.stderr
    assert "grpo-mcore 0." in job.code


def test_variables_of_the_shell_do_not_replace_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch puts SBATCH_ACCOUNT above an #SBATCH line, and its own command line above both."""
    program, asked = tmp_path / "sbatch", tmp_path / "asked"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{asked}\ncat >{tmp_path}/script\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ("launch.slurm.account=ours", "launch.slurm.options=['--comment=my run', '--exclusive']")
    assert main(["launch", "slurm", TWO_NODES, *words]) == 0
    options = asked.read_text().splitlines()
    assert {"--account=ours", "--comment=my run", "--exclusive", "--requeue", "--nodes=2"} <= {*options}
    lines = [line for line in (tmp_path / "script").read_text().splitlines() if line.startswith("#SBATCH ")]
    assert [line.replace('"', "") for line in lines] == [f"#SBATCH {option}" for option in options]


@pytest.mark.parametrize("cores", [None, "64"])
def test_a_step_of_slurm_gets_all_cores_of_its_job(cores: str | None) -> None:
    """srun's -c, also by this variable, limits a step to so many cores: it must be the job's or not there."""
    body = BODY.read_text()
    start, end = body.index("# Without -c a step"), body.index("on_head=(")
    program = f'set -euo pipefail\n{body[start:end]}\necho "${{SRUN_CPUS_PER_TASK:-}}"'
    settings = {"PATH": os.environ["PATH"]} | ({"SLURM_CPUS_PER_TASK": cores} if cores else {})
    done = subprocess.run(["bash", "-c", program], env=settings, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{cores or ''}\n"


def test_steps_do_not_repeat_the_requests_of_the_job_that_submitted() -> None:
    """sbatch hands all SLURM_ variables of an salloc on: srun ended with "mutually exclusive" and "job doesn't have
    GRES" (a real Slurm)."""
    body = BODY.read_text()
    start, end = body.index("# Requests of an interactive job"), body.index("mapfile -t nodes")
    foreign = (
        *("MEM_PER_CPU", "MEM_PER_NODE", "GPUS_PER_NODE", "GPUS_PER_TASK", "GPUS", "CPU_BIND", "CPU_BIND_LIST"),
        *("NTASKS_PER_GPU", "NTASKS_PER_TRES"),
    )
    settings = {f"SLURM_{name}": "1" for name in (*foreign, "GPUS_ON_NODE", "JOB_ID")} | {"PATH": os.environ["PATH"]}
    program = f"set -uo pipefail\n{body[start:end]}\nprintenv | grep ^SLURM | sort"
    done = subprocess.run(["bash", "-c", program], env=settings, capture_output=True, text=True, timeout=60)
    assert done.stdout == "SLURM_GPUS_ON_NODE=1\nSLURM_JOB_ID=1\n"


@pytest.mark.parametrize(
    ("given", "address"),
    [("10.0.0.1", "10.0.0.1:30010"), ("2001:db8::1", "[2001:db8::1]:30010"), (None, "10.0.0.1:30010")],
)
def test_the_heads_address_is_one_that_others_reach(given: str | None, address: str) -> None:
    """It may be one of IPv6. A server's BMC has a network of its own, whose interface may come first."""
    body, settings = BODY.read_text(), {"HEAD_IP": given} if given else {}
    start, end = body.index("head_ip=${HEAD_IP"), body.index('stage=""')
    here = "on_head=(at); at() { echo '169.254.0.18 10.0.0.1 fd00::1 '; }; port=30010"
    program = f"{here}; {body[start:end]} echo $address"
    done = subprocess.run(["bash", "-c", program], env=settings, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{address}\n"


@pytest.mark.parametrize(("refusals", "code", "said"), [(2, 0, ""), (9, 75, "submit again to go on")])
def test_a_job_that_slurm_does_not_queue_again_has_not_completed(
    refusals: int, code: int, said: str, tmp_path: Path
) -> None:
    """It ended as COMPLETED, with its run unfinished. A controller that is busy is asked again."""
    body = BODY.read_text()
    program = f"""
say() {{ echo "$*"; }}; sleep() {{ :; }}; bad="" used=0 RESTARTS=3 SLURM_JOB_ID=7 code=75 used_up={tmp_path}/used
scontrol() {{ echo "$1" >>{tmp_path}/asked; (($(grep -c requeue {tmp_path}/asked) > {refusals})); }}
{body[body.index("queue_again() {") :]}"""
    done = subprocess.run(["bash", "-uc", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and said in done.stdout, done


@pytest.mark.parametrize("how", ["its srun", "its log"])
def test_a_node_that_ends_before_all_are_there_ends_the_wait(how: str, tmp_path: Path) -> None:
    """The others waited for it as long as launch.start_timeout_s, half an hour."""
    body, log = BODY.read_text(), tmp_path / "ray-node2.log"
    end = "sleep 1" if how == "its srun" else f"(sleep 1; echo '{ENDED_BY_ITSELF}: exit code 1' >{log}) & sleep 50"
    program = f"""
gone() {{ [[ -z $1 ]] || ! kill -0 "$1" 2>/dev/null; }}; logs={tmp_path}
sleep 50 & head_pid=$!; sleep 50 & ready_pid=$!; {end} & workers_pid=$!
{body[body.index("ended=") : body.index('gone "$ready_pid" ||')]}
kill $head_pid $ready_pid; kill $workers_pid 2>/dev/null; echo over"""
    done = subprocess.run(["bash", "-uc", program], capture_output=True, text=True, timeout=40)
    assert done.stdout == "over\n"


def test_every_node_copies_the_models_before_its_ray_starts(tmp_path: Path) -> None:
    job = spec("launch.stage_to=/local/models", target="slurm")
    tmp_path = tmp_path / "it's here"
    tmp_path.mkdir()
    script, shown = job_script(job), tmp_path / "shown"
    start, end = script.index('stage=""'), script.index("# ---- shutdown")
    given = f'logs={shlex.quote(str(tmp_path))} RECIPE="it\'s r.yaml" address=a:1 gpus=0'
    program = f'{given}\n{script[start:end]}\nbash -c "$node" head 0'
    (python := tmp_path.parent / "python").write_text(
        f'#!/bin/sh\necho "$@" "$HF_HUB_CACHE" >>{shlex.quote(str(shown))}\n'
    )
    python.chmod(0o755)
    settings = {"STAGE_TO": "/local/models", "PYTHON": str(python), "START_TIMEOUT": "9", "SLURM_NODEID": "0"}
    done = subprocess.run(["bash", "-c", program], env=dict(os.environ) | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    copy, ray = shown.read_text().splitlines()
    assert copy.strip() == "-P -m grpo_mcore.cli.main prefetch it's r.yaml --stage /local/models"
    assert ray.startswith("-P -m grpo_mcore.cluster.ray_node head --address=a:1") and ray.endswith("/local/models/hub")
    assert "STAGE_TO=/local/models" in script and "HF_HUB_CACHE=$STAGE_TO/hub" in script


def test_pods_copy_the_models_before_ray_starts() -> None:
    on_node = "launch.k8s.volumes={/scratch: {hostPath: {path: /local}}}"
    pod = documents(spec(*ON_K8S, on_node, "launch.stage_to=/scratch/models", target="k8s"))[1]["spec"]
    pod = pod["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    [copy], [ray] = pod["initContainers"], pod["containers"]
    assert copy["args"] == ["--stage", "/scratch/models"] and copy["volumeMounts"] == ray["volumeMounts"]
    assert {"name": "HF_HUB_CACHE", "value": "/scratch/models/hub"} in ray["env"]
    assert not any(variable["name"] == "HF_HUB_CACHE" for variable in copy["env"])


def test_memory_and_time_follow_from_the_plan() -> None:
    found = spec("grpo.max_num_steps=2")
    memory, limit, notes = planned(load_recipe(TWO_NODES, ["grpo.max_num_steps=2"]).config)
    assert (found.memory_gb, found.time_limit, found.notes) == (memory, limit, notes)
    assert memory % 64 == 0 and memory > 512 and "plan predicts" in notes[0]
    assert limit == "02:00:00" and len(notes) == 2
    _, limit, notes = planned(load_recipe(TWO_NODES, ["grpo.max_num_steps=100000"]).config)
    assert limit == "04:00:00" and "raise launch.max_restarts" in notes[-1]
    given = ["launch.memory_gb_per_node=300", "launch.time_limit=02:00:00", "grpo.max_num_steps=2"]
    memory, limit, notes = planned(load_recipe(TWO_NODES, given).config)
    assert (memory, limit) == (300, "02:00:00") and notes == (
        "plan says that this does not fit an H100 server; grpo-mcore plan shows what is lacking",
    )
    memory, limit, notes = planned(load_recipe(TWO_NODES, ["policy.model_name=someone/unknown"]).config)
    assert (memory, limit) == (512, "04:00:00") and "neither a folder here" in notes[0]
