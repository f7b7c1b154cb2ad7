"""The words of `grpo-mcore eval`."""

import json
from pathlib import Path

import pytest

from grpo_mcore.algorithms.evaluate import EvalError
from grpo_mcore.cli.main import main
from grpo_mcore.cli.train import eval as verb
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.evaluation import models_by_name, report_page
from grpo_mcore.tools.report.comparison import differing_settings
from tests.unit.step import step_cases


def test_models_recipe_and_overrides_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(verb, "run", lambda args: seen.append((args.models, args.overrides, args.recipe)) or 0)
    assert main("eval a/model eval.seed=3 --config my.yaml results/step_4 +env.x.y=1".split()) == 0
    assert main("eval my.yaml a/model".split()) == main(["eval"]) == 0
    assert seen == [
        (["a/model", "results/step_4"], ["eval.seed=3", "+env.x.y=1"], "my.yaml"),
        (["a/model"], [], "my.yaml"),
        ([], [], None),
    ]


def test_checkpoints_of_two_runs_have_names_of_their_own(tmp_path: Path) -> None:
    """Most runs have a folder called checkpoints."""
    places = [str(tmp_path / run / "checkpoints") for run in ("dapo", "gspo")]
    for place in places:
        (folder := Path(place) / "step_8").mkdir(parents=True)
        (folder / "training_info.json").write_text('{"save_state": {"current_step": 8}, "metrics": {}}')
        (folder / "config.yaml").write_text(json.dumps(step_cases.config().model_dump(mode="json")))
    names = ["dapo/checkpoints/step_8", "gspo/checkpoints/step_8", "org/model"]
    assert list(models_by_name([*places, "org/model"])) == names
    assert list(models_by_name(places[:1])) == ["checkpoints/step_8"]
    with pytest.raises(EvalError, match="two of the models have the same name"):
        models_by_name(places[:1] * 2)


def test_a_report_has_no_secrets_of_the_recipe() -> None:
    """It is made to be shown, as a model card and a page are."""
    config = load_recipe("eval", ["logger.mlflow.tracking_uri=https://me:pass-1@host", "+env.math.api_key=sk-2"]).config
    text = report_page(config, [], {})
    assert "tracking_uri: https://(hidden)@host" in text and "pass-1" not in text and "sk-2" not in text
    logger = {"alarms": {"webhook": "https://hooks/1"}}
    different = differing_settings([{"logger": logger, "a": 1}, {"logger": {"alarms": {"webhook": None}}, "a": 2}])
    assert different == [{"logger.alarms.webhook": "(hidden)", "a": "1"}, {"logger.alarms.webhook": "null", "a": "2"}]


def test_two_recipes_and_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["a.yaml", "b.yaml"], "one recipe at a time"),
        (["--model", "m"], "unknown option: --model"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["eval", *words])
        assert message in capsys.readouterr().err
