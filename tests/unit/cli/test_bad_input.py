"""Mistakes in recipe, model or data show before anything starts: one message, no traceback."""

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from grpo_mcore.cli.main import guarded, main
from grpo_mcore.driver.run import setup
from grpo_mcore.families import FamilyError, params_of, shape_of
from grpo_mcore.tools.demo.arithmetic import make_tokenizer

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 32,
}
Refuse = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_tokenizer(folder := tmp_path_factory.mktemp("tokenizer"))
    return folder


def lay_weights(model: Path) -> None:
    """Write weights for the config that the model has now, unless it has others or none could fit."""
    ours, config = model / "zeros.safetensors", model / "config.json"
    if not config.exists() or {path.suffix for path in model.iterdir() if path != ours} & {".safetensors", ".bin"}:
        return
    with contextlib.suppress(FamilyError):
        params = params_of(shape_of(json.loads(config.read_text())))
        save_file({tensor.name: torch.zeros(tensor.shape) for param in params for tensor in param.hf}, ours)


@pytest.fixture
def refuse(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refuse:
    """Runs `grpo-mcore VERB r.yaml` with these overrides, and gives what it says after its name. The recipe is right:
    its model has the weights that its config.json describes, all zero."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(setup, "open_cluster", never)
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(CONFIG))
    Path("data.jsonl").write_text('{"input": "1+1=", "output": "2"}\n' * 8)
    Path("away").symlink_to("/no/disk")
    Path("empty.jsonl").touch()
    recipe = {
        "policy": {"model_name": "model", "tokenizer": {"name": str(tokenizer)}, "train_global_batch_size": 16,
                   "megatron_cfg": {"scheduler": {"lr_warmup_iters": 0}}},
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4},
        "data": {"train_data_path": "data.jsonl", "dataset_name": "ResponseDataset"},
        "env": {"math": {}},
        "cluster": {"platform": "cpu", "gpus_per_node": 2},
    }  # fmt: skip
    Path("r.yaml").write_text(yaml.safe_dump(recipe))

    def run(*words: str, code: int, verb: str = "train") -> str:
        lay_weights(Path("model"))
        assert main([verb, "r.yaml", *words]) == code
        out, err = capsys.readouterr()
        assert err.startswith(f"grpo-mcore {verb}: ") and "Traceback" not in out + err
        return err.removeprefix(f"grpo-mcore {verb}: ").rstrip("\n")

    return run


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("grpo.sed=1", "grpo.sed: unknown key; nearest known key: grpo.seed"),
        ("grpo.seed=-1", "grpo.seed: must be at least 0, got -1"),
        ("policy.megatron_cfg.optimizer.adam_beta1=1.0",
         "policy.megatron_cfg.optimizer.adam_beta1: must be below 1, got 1.0"),
        ("policy.megatron_cfg.optimizer.lr=1e30",
         "policy.megatron_cfg.optimizer.lr: must be at most 100000, got 1e+30"),
        ("grpo.seed=one", "grpo.seed: expected a whole number, got 'one'"),
        ('policy.generation.stop_strings=[""]',
         "policy.generation.stop_strings.0: expected a text that is not empty, got ''"),
        (
            "policy.train_global_batch_size=6",
            "policy.train_global_batch_size: 4 prompts x 4 generations = 16 samples do not divide into optimizer "
            "steps of 6 samples; nearest train_global_batch_size that does: 4 or 8; nearest num_prompts_per_step: 3 "
            "or 6",
        ),
        (
            "policy.megatron_cfg.tensor_model_parallel_size=4",
            "policy.megatron_cfg.tensor_model_parallel_size: one copy of the model needs TP 4 x PP 1 x CP 1 = 4 "
            "ranks, and 2 is not a multiple of that; there are cluster.num_nodes x gpus_per_node ranks, less "
            "those that engines or teachers have to themselves",
        ),
    ],
)  # fmt: skip
def test_wrong_recipe(refuse: Refuse, word: str, message: str) -> None:
    assert refuse(word, code=2) == f"1 problem in r.yaml\n  command line: {message}"


@pytest.mark.parametrize("verb", ["train", "sft"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "data file not found: data.jsonl"),
        ("", "data.jsonl: the dataset is empty"),
        ('{"input": "1", "output": "1"}\n\n{"input": 1 2}', "data.jsonl:3: not JSON (Expecting ',' delimiter"),
        ('{"input": "1", "output": "1"}\n[1]\n', "data.jsonl:2: expected a JSON object, got list"),
        (
            '{"input": "1", "output": "1"}\n{"question": "1"}\n',
            "1 of 2 rows cannot be used, more than data.max_unusable_share (0.05) allows: data.jsonl:2: no 'input'",
        ),
        ('{"question": "1"}\n' * 8, "data.jsonl:1: no 'input' in it; it has ['question']"),
    ],
)
def test_wrong_data(refuse: Refuse, verb: str, text: str | None, message: str) -> None:
    Path("data.jsonl").unlink() if text is None else Path("data.jsonl").write_text(text)
    said = refuse(code=1, verb=verb)
    assert said.startswith(message) and "\n" not in said


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_model_without_config(refuse: Refuse, verb: str) -> None:
    Path("model/config.json").unlink()
    assert refuse(code=1, verb=verb) == (
        "policy.model_name: model holds no config.json; give a Hugging Face folder, or a name of the hub"
    )


def test_a_model_that_is_right_passes_the_check(refuse: Refuse, capsys: pytest.CaptureFixture[str]) -> None:
    lay_weights(Path("model"))
    assert main(["train", "r.yaml", "--check", "grpo.max_num_steps=3"]) == 0
    assert capsys.readouterr().out.endswith("all checks passed; 3 steps are left, nothing was started\n")


def test_a_check_leaves_no_folder_behind(refuse: Refuse) -> None:
    lay_weights(Path("model"))
    Path("kept").mkdir()
    before = sorted(Path().iterdir())
    words = ["checkpointing.checkpoint_dir=new/deep/checkpoints", "logger.log_dir=new/logs"]
    assert main(["train", "r.yaml", "--check", *words]) == 0
    assert sorted(Path().iterdir()) == before
    assert main(["train", "r.yaml", "--check", "checkpointing.checkpoint_dir=kept"]) == 0
    assert Path("kept").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env.math.math_verify_impl=no_such_module:reward"],
         "cannot import the verifier 'no_such_module:reward': No module named 'no_such_module'; modules are"),
        (["env.math.math_verify_impl=broken:reward"],
         "cannot import the verifier 'broken:reward': ZeroDivisionError: division by zero ("),
        (["~env.math", "+env.rules={components: {own: {type: function, path: 'reward:sum_of'}}}"],
         "cannot import the reward function 'reward:sum_of': module 'reward' has no attribute 'sum_of'"),
        (["~env.math", "+env.rules={components: {own: {type: function, path: 'reward:of_level'}}}"],
         "the reward function 'reward:of_level' does not fit the data: it asks for level, but a sample has extra_"),
        (["~env.math", "+env.maths={}"], "unknown environment 'maths': did you mean 'math'?"),
        (["grpo.num_prompts_per_step=16", "policy.train_global_batch_size=64"],
         "the dataset has 8 usable prompts, fewer than one batch of 16"),
        (["logger.log_dir=data.jsonl/logs"], "logger.log_dir: data.jsonl/logs cannot be written: Not a directory"),
        (["checkpointing.checkpoint_dir=data.jsonl"],
         "checkpointing.checkpoint_dir: data.jsonl cannot be written: it is a file, not a folder"),
        (["logger.log_dir=away/logs"],
         "logger.log_dir: away/logs cannot be written: away is a link to /no/disk, which is not there (is its disk "),
        (["checkpointing.checkpoint_dir=/"],
         "checkpointing.checkpoint_dir: / is no folder for checkpoints; name one of their own"),
        (["checkpointing.metric_name=val:nope"],
         "checkpointing.metric_name: there is no validation metric 'nope'; known: accuracy, "),
        (["policy.generation.stop_token_ids=[2, 32]"],
         "policy.generation.stop_token_ids: 32 is no token of the model, which has 0 to 31: no "),
        (["policy.model_name=nobody/no-such-model"],
         "policy.model_name 'nobody/no-such-model' is not a folder here, and could not be fetched from"),
        (["policy.model_name=./folder"], "policy.model_name: there is no folder './folder'; the working directory "),
        (["policy.model_name=no/such/folder"], "policy.model_name: there is no folder 'no/such/folder'; the working "),
        (["policy.megatron_cfg.tensor_model_parallel_size=4", "cluster.gpus_per_node=4"],
         "policy.megatron_cfg.tensor_model_parallel_size: 4 does not divide num_attention_heads 6 of this qwen3 model; "
         "it can be one of [1, 2]"),
        (["+env.math.workers=1"], "env.math.workers: unknown key; did you mean 'num_workers'?"),
        (["policy.tokenizer.chat_template='{% for m in messages[-1:] %}{{ m.content }}{% endfor %}'",
          "grpo.max_rollout_turns=2", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"],
         "grpo.max_rollout_turns above 1: the chat template shows an earlier answer 0 times instead of once; set "
         "another policy.tokenizer.chat_template"),
        (["--resume"], "--resume: there is no step_N folder in results/grpo; start without --resume"),
    ],
)  # fmt: skip
def test_the_check_finds(refuse: Refuse, words: list[str], message: str) -> None:
    Path("reward.py").write_text("def sum_of_digits(response, info): ...\ndef of_level(prompt, response, level): ...\n")
    Path("broken.py").write_text("def reward(response, truth): ...\nONE = 1 / 0\n")
    for said in (refuse("--check", *words, code=1), refuse(*words, code=1)):
        assert said.startswith(message) and "\n" not in said
        assert words != ["--resume"] or not Path("results").exists()


LATENT = {
    "model_type": "deepseek_v3", "num_key_value_heads": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1,
}  # fmt: skip
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def test_models_that_vllm_cannot_run_on_cpu_are_for_sft(refuse: Refuse) -> None:
    Path("model/config.json").write_text(json.dumps(CONFIG | LATENT))
    said = refuse(code=1)
    assert said.startswith(f"policy.model_name: vLLM's CPU build cannot run this {LATENT['model_type']} model: its ")
    assert "kv_lora_rank" in said
    with pytest.raises(AssertionError, match="a cluster was started"):
        refuse("policy.train_global_batch_size=8", code=1, verb="sft")


def test_sparse_attention_is_refused(refuse: Refuse) -> None:
    indexed = CONFIG | LATENT | {"model_type": "glm_moe_dsa", "index_topk": 4096}
    Path("model/config.json").write_text(json.dumps(indexed))
    assert "vLLM always gives it sparse attention, which has no CPU kernel" in refuse(code=1)
    Path("model/config.json").write_text(json.dumps(indexed | {"index_topk": 8}))
    assert "beyond index_topk 8 tokens the model's indexer chooses keys" in refuse(code=1)


PUBLISHED_LATENTS = LATENT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize("family", [{}, EXPERTS, PUBLISHED_LATENTS], ids=["dense", "experts", "latent"])
def test_what_a_refit_reaches_is_not_refused(refuse: Refuse, family: dict[str, Any]) -> None:
    Path("model/config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 6} | family))
    at = "policy.megatron_cfg."
    words = ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"]
    with pytest.raises(AssertionError, match="a cluster was started"):
        refuse(*(at + word for word in [*words, "num_layers_in_first_pipeline_stage=2"]), code=1)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ({}, "num_attention_heads 6 of this qwen3 model"),
        (EXPERTS | {"num_attention_heads": 64, "num_key_value_heads": 64, "moe_intermediate_size": 33},
         "the experts' intermediate size 33 of this qwen3_moe model"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_share_the_model_out(refuse: Refuse, family: dict[str, Any], message: str) -> None:
    Path("model/config.json").write_text(json.dumps(CONFIG | family))
    said = refuse("policy.generation.vllm_cfg.tensor_parallel_size=4", code=1)
    assert said == f"policy.generation.vllm_cfg.tensor_parallel_size: 4 does not divide {message}"


@pytest.mark.parametrize("lost", ["hidden_size", "num_experts", "moe_intermediate_size"])
def test_a_model_config_that_lacks_a_key(refuse: Refuse, lost: str) -> None:
    config = {key: value for key, value in (CONFIG | EXPERTS).items() if key != lost}
    Path("model/config.json").write_text(json.dumps(config))
    assert refuse(code=1) == f"policy.model_name: config.json of a qwen3_moe model lacks {lost}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("config nope.yaml", "no recipe 'nope.yaml' in ., "),
        ("config r.yaml grpo.sed=1", "nearest known key: grpo.seed"),
        ("config --explain optimizer.learning_rate", "nearest known key: policy.megatron_cfg.optimizer.lr"),
        ("plan r.yaml --device H300", "--device H300: known are A100-40GB"),
        ("plan r.yaml --search 0", "argument --search: a whole number of at least 1 is needed, got '0'"),
        ("plan r.yaml --search two", "argument --search: a whole number of at least 1 is needed, got 'two'"),
        ("plan r.yaml --mean-length -5", "argument --mean-length: a whole number of at least 1 is needed, got '-5'"),
        ("plan r.yaml --memory-gb 0", "argument --memory-gb: a number above 0 is needed, got '0'"),
        ("plan r.yaml --memory-gb 1e300", "argument --memory-gb: a finite number is needed, got '1e300'"),
        ("plan r.yaml policy.refit_buffer_size_gb=1e300", "refit_buffer_size_gb: 1e+300 is too large a number"),
        (f"config r.yaml grpo.max_num_steps={2**63}", "grpo.max_num_steps: 9223372036854775808 is too large a number"),
        ("plan r.yaml --memory-gb nan", "argument --memory-gb: a finite number is needed, got 'nan'"),
        ("rehearse r.yaml --steps 0", "argument --steps: a whole number of at least 1 is needed, got '0'"),
        ("sweep r.yaml grpo.seed=1,2 --seeds 0", "argument --seeds: a whole number of at least 1 is needed, got '0'"),
        ("watch results --interval -1", "argument --interval: a number above 0 is needed, got '-1'"),
        ("export nope --output out", "nope does not exist; give a folder step_N"),
        ("export model --output out", "model holds no checkpoint (step_N with training_info.json)"),
        ("export model", "the following arguments are required: --output"),
        ("data check nope.jsonl", "data file not found: nope.jsonl"),
        ("data check nope.yaml", "no recipe 'nope.yaml' in ., "),
        ("data chek data.jsonl", "invalid choice: 'chek'"),
        ("launch k9s r.yaml", "where to: slurm or k8s; then the recipe"),
        (
            "launch slurm r.yaml cluster.backend=local cluster.gpus_per_node=1",
            "there is nothing to launch; set it to ray",
        ),
        ("launch k8s r.yaml --dry-run", "launch.container: Kubernetes needs an image"),
        ("report nope", "nope holds no run: there is no metrics.jsonl in it"),
        ("watch r.yaml", "r.yaml holds no run: there is no metrics.jsonl in it"),
        ("replay nope --step 1", "nope holds no run"),
        ("replay nope", "the following arguments are required: --step"),
        ("ledger .", "there is no ledger.jsonl; give a run's log folder, or its folder of checkpoints"),
        ("ledger empty.jsonl", "empty.jsonl is empty: no run has begun in it"),
        (
            "sweep r.yaml grpo.seed=1,2 --folder away/s",
            "--folder: away/s cannot be written: away is a link to /no/disk",
        ),
        ("parity nope", "nope holds no config.json"),
        ("parity model --layouts XY3", "is not one of TP, PP, VPP, CP, DP, EP, ETP with a number"),
        ("trian r.yaml", "there is no command 'trian'; nearest: train"),
    ],
)
def test_typical_mistakes_of_every_verb(
    refuse: Refuse, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    try:
        code = main(words.split())
    except SystemExit as ended:  # argparse
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    assert code and message in err and "Traceback" not in out + err, err
    assert sum(line.startswith("grpo-mcore") for line in err.splitlines()) == 1


@pytest.mark.parametrize(
    ("verb", "error", "message"),
    [
        (
            "sweep",
            FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
            "found in ['/tmp']: is the ",
        ),
        ("train", OSError(36, "File name too long", "n" * 300), "nn: File name too long"),
        ("report", FileExistsError(17, "File exists", "away"), "away: away is a link to /no/disk, which is not there"),
    ],
)
def test_a_disk_that_takes_no_file_is_named(
    refuse: Refuse, capsys: pytest.CaptureFixture[str], verb: str, error: OSError, message: str
) -> None:
    def full() -> int:
        raise error

    assert guarded(verb, full) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("pickled", [],
         "policy.model_name: model contains no .safetensors file; it has pytorch_model.bin, which is not"),
        ("missing", [],
         "policy.model_name: model/model.safetensors.index.json names 2 files, and 1 of them are missing"),
        ("cut", [], "policy.model_name: model/model-00001-of-00002.safetensors is no whole safetensors file"),
        ("whole", ["+policy.hf_config_overrides={intermediate_size: 64}"], "mlp.gate_proj.weight has shape [96, 64], "),
        ("whole", ["+policy.hf_config_overrides={vocab_size: 16}"], "model.embed_tokens.weight has shape [32, 64], "),
        ("whole", ["+policy.hf_config_overrides={rope_thet: 1.0}"],
         "the model's config.json has no such key; nearest: rope_theta"),
        ("small", [], "with number 31, but the model 'model' has 8 tokens"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_model_folder_that_is_not_whole(refuse: Refuse, kind: str, words: list[str], message: str, verb: str) -> None:
    """One message, before a cluster is started."""

    config = CONFIG | ({"vocab_size": 8} if kind == "small" else {})
    Path("model/config.json").write_text(json.dumps(config))
    shapes = {tensor.name: tensor.shape for param in params_of(shape_of(config)) for tensor in param.hf}
    if kind == "pickled":
        Path("model/pytorch_model.bin").write_bytes(b"x")
        shapes = {}
    where = {}
    for number, name in enumerate(("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")):
        part = sorted(shapes)[number::2]
        where |= dict.fromkeys(part, name)
        if part and not (kind == "missing" and number):
            save_file({tensor: torch.zeros(shapes[tensor]) for tensor in part}, Path("model") / name)
    if where:
        Path("model/model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    if kind == "cut":
        (file := Path("model/model-00001-of-00002.safetensors")).write_bytes(file.read_bytes()[:-8])
    said = refuse("policy.train_global_batch_size=8" if verb == "sft" else "--check", *words, code=1, verb=verb)
    assert message in said and "\n" not in said


@pytest.mark.parametrize(
    ("truth", "message"),
    [({"style": "rule", "ground_truth": "2"}, "mapping|dict"), ("", "blank|empty|ground")],
    ids=["mapping", "blank"],
)
def test_a_truth_that_no_answer_can_match_is_refused(refuse: Refuse, truth: object, message: str) -> None:
    """verl's rows had trained on the text of a dict, with reward 0 and exit code 0."""
    Path("data.jsonl").write_text(f"{json.dumps({'input': '1+1=', 'output': truth})}\n" * 8)
    assert re.search(message, refuse("--check", code=1))


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_model_without_weights(refuse: Refuse, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """It had passed, and was refused only when the policy loaded it."""
    monkeypatch.setattr(f"{__name__}.lay_weights", lambda _: None)
    assert refuse("--check", code=1, verb=verb) == "policy.model_name: model contains no .safetensors file"


def test_a_model_that_no_hub_has_is_refused_by_the_plan_of_a_refit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback, after half a minute of asking again."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["refit", "plan", "grpo_math_1B", "policy.model_name=some/one"]) == 2
    assert "'some/one' is not a folder here, and could not be fetched" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was a traceback. Steps without samples made a page without them, and a long range of steps took all memory."""
    run, gone = tmp_path / "exp_001", str(tmp_path / "gone" / "file")
    run.mkdir()
    (run / "hyperparams.json").write_text("{}")
    for words in (["report", str(run)], ["launch", "slurm", "grpo_math_1B"]):
        assert main([*words, "--output", gone]) == 1
        assert f"grpo-mcore {words[0]}: {gone}: No such file or directory\n" in capsys.readouterr().err
    for steps, said in (("7", "no samples of 7 are recorded; there are none"), ("1-999999999", "there are none")):
        assert main(["report", str(run), "--samples", steps]) == 1
        assert said in capsys.readouterr().err
