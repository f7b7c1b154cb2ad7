import pytest

from grpo_mcore.recipe import is_override
from tests.unit.recipe.conftest import MINIMAL


def test_values_are_yaml(load) -> None:
    config = load(
        MINIMAL,
        "policy.megatron_cfg.optimizer.lr=1e-6",
        "policy.generation.stop_strings=['</a>', \"b=c\"]",
        "policy.generation.vllm_kwargs={max_num_batched_tokens: 8}",
        "loss_fn.ratio_clip_c=null",
        "grpo.val_at_end=true",
        "checkpointing.checkpoint_dir=results/a b",
    ).config
    assert config.policy.megatron_cfg.optimizer.lr == 1e-6
    assert config.policy.generation.stop_strings == ["</a>", "b=c"]
    assert config.policy.generation.vllm_kwargs == {"max_num_batched_tokens": 8}
    assert config.loss_fn.ratio_clip_c is None
    assert config.grpo.val_at_end is True
    assert config.checkpointing.checkpoint_dir == "results/a b"


def test_mappings_may_be_written_without_spaces_as_for_hydra(load) -> None:
    kwargs = load(MINIMAL, "policy.generation.vllm_kwargs={seed:8,additional_config:{a:1e-6,b:[1,x:y]}}").config
    assert kwargs.policy.generation.vllm_kwargs == {"seed": 8, "additional_config": {"a": 1e-6, "b": [1, "x:y"]}}


def test_mappings_are_merged_and_free_keys_may_be_new(load) -> None:
    text = MINIMAL + "env: {math: {num_workers: 8}}\n"
    env = load(text, "env.math.stop_strings=[x]", "+env.code={num_workers: 2}", "data.train.env_name=math")
    assert env.config.env == {"math": {"num_workers": 8, "stop_strings": ["x"]}, "code": {"num_workers": 2}}


def test_an_empty_mapping_empties_one(load) -> None:
    text = MINIMAL + "loss_fn: {path: 'm:L', options: {weight: 2, other: 3}}\n"
    assert load(text, "loss_fn.options={weight: 1}").config.loss_fn.options == {"weight": 1, "other": 3}
    assert load(text, "loss_fn.options={}").config.loss_fn.options == {}
    assert load(text, "loss_fn.options={}", "loss_fn.options={new: 1}").config.loss_fn.options == {"new": 1}


def test_plus_adds_and_tilde_removes(load) -> None:
    text = MINIMAL + "grpo: {seed: 1, val_period: 5}\n"
    assert load(text, "+grpo.max_num_steps=3").config.grpo.max_num_steps == 3
    assert load(text, "++grpo.seed=3").config.grpo.seed == 3
    removed = load(text, "~grpo.val_period", "~grpo.seed=1")
    assert removed.config.grpo.val_period == 10 and removed.provenance["grpo.seed"] == "default"


def test_positions_name_datasets_of_a_list(load) -> None:
    text = "policy: {model_name: m}\ndata: {train: [{data_path: a}, {data_path: b}]}\n"
    config = load(text, "data.train.1.data_path=c", "data.train.0.input_key=q").config
    assert [entry.data_path for entry in config.data.train] == ["a", "c"]
    assert config.data.train[0].input_key == "q"
    assert [entry.data_path for entry in load(text, "~data.train.0").config.data.train] == ["b"]


def test_later_overrides_win_and_may_interpolate(load) -> None:
    config = load(MINIMAL, "grpo.seed=1", "grpo.seed=2", "sft.seed=${grpo.seed}").config
    assert config.sft.seed == 2


def test_a_preset_is_no_key(problems) -> None:
    assert problems(MINIMAL, "preset=gspo")[0].startswith(
        "command line: preset: unknown key; put presets on a recipe with"
    )


def test_errors_are_collected(problems) -> None:
    assert problems(
        MINIMAL + "grpo: {seed: 1}\n",
        "+grpo.seed=2",
        "~grpo.val_period",
        "~grpo.seed=5",
        "grpo.sed=3",
        "grpo.max_num_steps=many",
        "grpo.val_period=[1",
    ) == [
        "command line: grpo.seed: + adds a key, but r.yaml:6 sets this one already, to 1; "
        "write grpo.seed=... or ++grpo.seed=...",
        "command line: grpo.val_period: ~ removes a key, but no file sets this one",
        "command line: grpo.seed: ~ removes it only if it is 5, but it is 1",
        "command line: grpo.val_period: not valid YAML: while parsing a flow sequence, expected ',' or ']', "
        "but got '<stream end>'",
        "command line: grpo.max_num_steps: expected a whole number, got 'many'",
        "command line: grpo.sed: unknown key; nearest known key: grpo.seed",
    ]


def test_a_comment_is_no_part_of_a_value(load, problems) -> None:
    text = "policy: {model_name: m}\ndata: {train: {data_path: a}}\n"
    assert load(text, "logger.wandb.name='\"run #5\"'", "logger.log_dir=a#b").config.logger.wandb.name == '"run #5"'
    assert problems(text, "logger.wandb.name=run #5") == [
        "command line: logger.wandb.name: 'run #5' holds a comment, which YAML leaves out; to keep it, quote the text: "
        "'\"...\"'"
    ]


def test_home_is_the_users(load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    text = "policy: {model_name: ~/m}\ndata: {train: {data_path: a~/b}}\n"
    config = load(text, "checkpointing.checkpoint_dir=~/runs/x").config
    assert (config.policy.model_name, config.checkpointing.checkpoint_dir) == ("/users/me/m", "/users/me/runs/x")
    assert config.data.train[0].data_path == "a~/b"


def test_variables_of_the_environment_are_named_as_omegaconf_names_them(
    load, problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    """$SCRATCH/runs was a folder called $SCRATCH. Each problem is one line: the key's type is not its fault."""
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    text = MINIMAL + "checkpointing: {checkpoint_dir: '%s/runs'}\n"
    assert load(text % "${oc.env:SCRATCH}").config.checkpointing.checkpoint_dir == "/scratch/me/runs"
    assert load(MINIMAL, "grpo.seed=${oc.decode:${oc.env:SEED_OF_NOBODY,7}}").config.grpo.seed == 7
    for written, said in (
        ("$SCRATCH", "no shell reads a recipe; write ${oc.env:SCRATCH}/..."),
        ("${SCRATCH}", "SCRATCH is not a key of the recipe; for the environment variable write ${oc.env:SCRATCH}"),
        ("${env:SCRATCH}", "there is no function 'env'; known: add, sub, mul, div, floordiv, max, min, oc.env"),
        ("${oc.env:NOT_THERE}", "Environment variable 'NOT_THERE' not found"),
    ):
        (line,) = problems(text % written)
        assert line.startswith("r.yaml:6: checkpointing.checkpoint_dir: ") and said in line
    assert load(MINIMAL, "launch.env.OMP_NUM_THREADS=8").config.cluster.env_vars == {"OMP_NUM_THREADS": "8"}
    assert load(text % "a$SCRATCH").config.checkpointing.checkpoint_dir == "a$SCRATCH/runs"


def test_a_list_needs_a_position(problems) -> None:
    text = "policy: {model_name: m}\ndata: {train: [{data_path: a}, {data_path: b}]}\n"
    assert problems(text, "data.train.data_path=c", "data.train.7.data_path=c") == [
        f"command line: data.train.{rest}: data.train is a list of 2, set at r.yaml:2: "
        "name an entry by its position, such as data.train.0.data_path"
        for rest in ("data_path", "7.data_path")
    ]


@pytest.mark.parametrize("word", ["a.b=c", "a=", "+a.b=c", "++a.b=c", "~a.b", "~a.b=c", "data.train.0.x=a=b"])
def test_words_that_are_overrides(word: str) -> None:
    assert is_override(word)


@pytest.mark.parametrize("word", ["a.yaml", "recipes/a=b.yaml", "grpo_math_1B", "+a.b", "=c", "--a=b", "./x=y"])
def test_words_that_are_not_overrides(word: str) -> None:
    assert not is_override(word)


def test_variables_of_the_environment_have_one_key(load, problems) -> None:
    assert load(MINIMAL, "cluster.env_vars=[A, B_*]").config.cluster.env_vars == {"A": None, "B_*": None}
    found = load(MINIMAL, "cluster.env_vars={NCCL_SOCKET_IFNAME: ib0, PORT: 7, MY_TOKEN: null}").config.cluster.env_vars
    assert found == {"NCCL_SOCKET_IFNAME": "ib0", "PORT": "7", "MY_TOKEN": None}
    assert "a secret does not belong in a recipe" in str(problems(MINIMAL, "cluster.env_vars={MY_TOKEN: abc}"))
    assert "a pattern has no value" in str(problems(MINIMAL, "cluster.env_vars={'NCCL_*': x}"))
    both = load(MINIMAL, "cluster.env_vars=[A]", "+launch.env={A: x, B: y}")
    assert both.config.cluster.env_vars == {"A": "x", "B": "y"}
    assert "launch.env: used as cluster.env_vars" in str(both.imported[0])
    assert "contradicts" in str(problems(MINIMAL, "cluster.env_vars={A: z}", "+launch.env={A: x}"))
