import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mcore.cli.main import main
from grpo_mcore.tools.demo.arithmetic import make_tokenizer

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"q{n // 2}"}]},
            "output": [{"type": "message", "content": f"a{n}"}],
            "reward": float(n % 2),
        }
        for n in range(8)
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


# The commands of the specification, verbatim.
COMMANDS = [
    "transform_gym_to_grpo.py --input rollouts.jsonl --output grpo_train.jsonl --reward_threshold 0.0",
    "transform_gym_to_grpo.py --input rollouts.jsonl --output train.jsonl",
    "transform_gym_to_sft.py --input rollouts.jsonl --output sft_train.jsonl --reward_threshold 0.95 --format openai",
    "transform_gym_to_sft.py --input rollouts.jsonl --output sft_train.jsonl --reward_threshold 0.95 --format simple",
    "transform_gym_to_dpo.py --input rollouts.jsonl --output dpo_train.jsonl --min_gap 0.2 --strategy same_prompt",
    "transform_gym_to_dpo.py --input rollouts.jsonl --output dpo_train.jsonl --min_gap 0.2 --strategy stratified",
    "transform_gym_to_dpo.py --input rollouts.jsonl --output d.jsonl --min_gap 0.1 --high_threshold 0.6",
    "transform_gym_to_dpo.py --input rollouts.jsonl --output d.jsonl --strategy stratified --low_threshold 0.5",
]
KEYS = {"grpo": {"input", "output"}, "openai": {"messages"}, "simple": {"input", "output"}}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_documented_commands(
    rollouts: Path, command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From another folder; the first of each script in a process of its own, which has the scripts' folder alone."""
    script, *words = command.split()
    if command == next(first for first in COMMANDS if first.startswith(script)):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([sys.executable, ROOT / script, *words], cwd=rollouts, env=environment, check=True)
    else:
        monkeypatch.setattr(sys, "argv", [script, *words])
        with pytest.raises(SystemExit, match="^0$"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    assert "rows in                         8" in capfd.readouterr().out
    rows = [json.loads(line) for line in Path(words[words.index("--output") + 1]).read_text().splitlines()]
    wanted = next((keys for kind, keys in KEYS.items() if kind in command), {"prompt", "chosen", "rejected"})
    assert rows and all(wanted <= set(row) for row in rows)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("gym-to-grpo --input rollouts.jsonl --output o.jsonl --no_ground_truth", 0, ""),
        ("gym-to-sft --input rollouts.jsonl --output o.jsonl --reward_threshold 9", 1,
         "no row was kept, so o.jsonl was not"),
        ("gym-to-dpo --input rollouts.jsonl --output o.jsonl --min_gap 9", 1, "no row was kept"),
        ("gym-to-grpo --input missing.jsonl --output o.jsonl", 1, "grpo-mcore data: missing.jsonl: cannot be read"),
        ("gym-to-grpo --input bad.jsonl --output o.jsonl --strict", 1, "bad.jsonl:1: not JSON"),
    ],
)  # fmt: skip
def test_exit_codes(rollouts: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, said: str) -> None:
    (rollouts / "bad.jsonl").write_text("{\n")
    assert main(["data", *words.split()]) == code
    assert said in capsys.readouterr().err
    assert (rollouts / "o.jsonl").exists() == (code == 0)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "gym-to-rl",
        "gym-to-grpo --input a",
        "gym-to-sft --input a --output b --format xml",
        "gym-to-grpo --input a --output b --reward_threshold nan",
        "gym-to-grpo --input a --output b c=d",
        "check a.jsonl --bogus",
        "check",
    ],
)
def test_wrong_command_lines(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["data", *words.split()])
    assert exit.value.code == 2 and re.search("usage: grpo-mcore data", capsys.readouterr().err)


def test_transforming_and_checking_fields_start_without_torch(rollouts: Path) -> None:
    code = (
        "import sys; from grpo_mcore.cli.main import main\n"
        "for kind in ('grpo', 'sft', 'dpo'): assert not main(['data', f'gym-to-{kind}', *sys.argv[1:]])\n"
        "main(['data', 'check', 'o.jsonl'])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'megatron', 'vllm', 'ray'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    command = [sys.executable, "-c", code, "--input", "rollouts.jsonl", "--output", "o.jsonl"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_reader_that_stops_reading(rollouts: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "grpo_mcore.cli.main", "data", "check", "rollouts.jsonl"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert result.returncode == 0 and "Traceback" not in result.stderr


def test_a_recipe_stands_for_all_its_data(rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"input": f"{n}+1=", "output": str(n + 1)}) for n in range(3)]
    for name in ("train", "val"):
        Path(f"{name}.jsonl").write_text("\n".join(rows))
    data = {"train": {"data_path": "train.jsonl"}, "validation": {"data_path": "val.jsonl"}}
    (rollouts / "my.yaml").write_text(json.dumps({"defaults": "grpo-arithmetic-cpu", "data": data}))
    make_tokenizer(rollouts / "tokenizer")
    words = ["data", "check", "my.yaml", "policy.tokenizer.name=tokenizer", "--samples", "0"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "train.jsonl: 3 rows, 3 usable" in said and "val.jsonl: 3 rows, 3 usable" in said
    by_name = [*words[:2], "grpo-arithmetic-cpu", *words[3:], "data.train.data_path=val.jsonl", "data.validation=null"]
    assert main(by_name) == 0 and "val.jsonl: 3 rows, 3 usable" in capsys.readouterr().out
    assert main(["data", "check", "val.jsonl", "grpo.seed=3"]) == 2
    assert "grpo.seed=3 replaces a recipe's value: name it, --recipe" in capsys.readouterr().err
    Path("val.jsonl").write_text("{}\n")
    assert main(words) == 1 and "val.jsonl: 1 rows, 0 usable" in capsys.readouterr().out
    assert main(["data", "check", "eval.yaml"]) == 1
    assert "no dataset of the recipe is read from a file" in capsys.readouterr().err
