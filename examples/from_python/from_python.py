"""A whole run from Python: build a recipe, train, read the metrics, export, generate.

    python examples/from_python/from_python.py [key=value ...]

`make demo` first: it makes the model and the data that the recipe names. The arguments override its keys, as on the
command line. `main` is all there is; docs/python.md says more about each line, and about runs whose policy, engines and
environments you hold in your hands.

What it is not: a loop of your own. For that see examples/custom_loop.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from transformers import pipeline

from grpo_mcore.algorithms.grpo import grpo_train
from grpo_mcore.driver.run.run import open_run, prepare
from grpo_mcore.observe import read_metrics
from grpo_mcore.recipe import load_recipe
from grpo_mcore.tools.export import export

RECIPE = Path(__file__).resolve().parents[1] / "custom_reward" / "recipe.yaml"


def main(overrides: Sequence[str] = (), model: Path = Path("results/from_python")) -> tuple[pd.DataFrame, str]:
    """Train, export the last checkpoint to `model`. Return the metrics by step, and the answer to a sum."""
    config = load_recipe(str(RECIPE), ["grpo.max_num_steps=20", *overrides]).config
    prepared = prepare(config)  # raises what is wrong with recipe, data, reward or folders; nothing is started yet
    with open_run(prepared) as run:
        grpo_train(**vars(run))
    metrics = pd.DataFrame(read_metrics(run.logger.log_dir / "metrics.jsonl", "train")).set_index("step")
    export(Path(config.checkpointing.checkpoint_dir), model)
    generate = pipeline("text-generation", str(model))
    (answer,) = generate([{"role": "user", "content": "27+15="}], max_new_tokens=4)
    return metrics, answer["generated_text"][-1]["content"]


if __name__ == "__main__":
    table, text = main(sys.argv[1:])
    print(table[["reward", "reward/share", "loss", "timing/total"]])
    print(f"27+15={text}")
