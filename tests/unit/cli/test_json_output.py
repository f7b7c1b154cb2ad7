"""Commands with `--json` print one value of JSON and nothing else."""

import json
import logging

import pytest

from grpo_mcore.cli.json_output import only_json, print_json


def test_nothing_else_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with only_json():
        print("cluster: ready")
        logging.getLogger("grpo_mcore").info("a note")
        print_json({"loss": [1.5, float("nan")], "bound": float("-inf"), "text": "é"})
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"loss": [1.5, None], "bound": None, "text": "é"}
    assert "NaN" not in printed.out and "cluster: ready" in printed.err
    print("afterwards")
    assert capsys.readouterr().out == "afterwards\n"
