# Two commands are enough: `make demo` and `make test`. Each makes .venv first where there is none.
# ARGS goes to the program: make test ARGS="-k packing -x", make demo ARGS="--help".

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
BIN := .venv/bin
# Where bytecode may not be kept, each of a run's processes compiles torch, vLLM and Ray anew.
unexport PYTHONDONTWRITEBYTECODE
# A whole suite goes over two processes; what ARGS chooses in one, which starts sooner.
PARALLEL := $(if $(ARGS),,-n 2)

.DEFAULT_GOAL := help
.PHONY: help setup launch-env demo test test-fast lint lock clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: setup ## GRPO trains a small model on two CPU cores: a few minutes, results in results/demo
	@$(BIN)/grpo-mcore demo $(ARGS)

test: setup lint ## lint, then every test
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-fast: setup ## the unit tests: no process group, no engine, under a minute
	@$(BIN)/python -m pytest tests/unit -m "not slow" $(PARALLEL) $(ARGS)

lint: setup ## ruff everywhere, mypy on the pure rooms
	@$(BIN)/ruff check .
	@$(BIN)/mypy

setup: ## make .venv, or bring it up to date (other targets do this by themselves)
	@scripts/setup_cpu.sh

launch-env: ## make .venv-launch: NeMo-Run, for launchers/nemo_run
	@scripts/setup_launch.sh

lock: ## resolve pyproject.toml anew into requirements/*.lock (ARGS=--upgrade for newer versions)
	@$${PYTHON:-python3} scripts/lock.py $(ARGS)

clean: ## remove .venv, .venv-launch and caches; results, logs and checkpoints stay
	@rm -rf .venv .venv-launch .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
