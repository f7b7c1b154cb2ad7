"""`python examples/run_eval.py [--config recipes/eval.yaml] [generation.model_name=... key=value ...]`: the same as
`grpo-mcore eval`, under the name that NeMo RL gives it."""

from __future__ import annotations

import sys

from grpo_mcore.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
