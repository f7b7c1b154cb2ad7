# The two main commands are `make demo` and `make test`. Both make .venv first if it is missing.
# ARGS goes to the program: make test ARGS="-k packing -x", make demo ARGS="--help".

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
BIN := .venv/bin
# Without bytecode files, each process of a run would compile torch, vLLM and Ray again.
unexport PYTHONDONTWRITEBYTECODE
# The whole suite runs in three processes, since on two cores one of them mostly waits (for an engine's start, for the end
# of something killed); a selection by ARGS in one, which starts sooner.
PARALLEL := $(if $(ARGS),,-n 3)

.DEFAULT_GOAL := help
.PHONY: help setup launch-env demo test test-fast lint lock docs clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: setup ## train a small model with GRPO on two CPU cores: a few minutes, files in results/demo
	@$(BIN)/grpo-mcore demo $(ARGS)

test: setup lint ## run lint, then the tests (CONTRIBUTING.md says which)
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-fast: setup ## run the unit tests without the thorough ones: a minute or two
	@$(BIN)/python -m pytest tests/unit -m "not slow" $(PARALLEL) $(ARGS)

lint: setup ## run ruff on everything, mypy and import-linter on the package
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy

setup: ## make .venv, or update it (the targets above do this themselves)
	@scripts/setup_cpu.sh

launch-env: ## make .venv-launch with NeMo-Run, for launchers/nemo_run
	@scripts/setup_launch.sh

lock: ## resolve pyproject.toml into requirements/*.lock (ARGS=--upgrade for newer versions)
	@$${PYTHON:-python3} scripts/lock.py $(ARGS)

docs: setup .venv-docs/.ready ## build guides, recipe keys and API pages as a site in site/ (makes .venv-docs)
	@$(BIN)/grpo-mcore config --reference > docs/recipe.md
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)

.venv-docs/.ready: requirements/docs.lock
	@rm -rf .venv-docs
	@$${PYTHON:-python3} -m venv .venv-docs
	@scripts/install_locked.sh .venv-docs/bin/python requirements/docs.lock all --quiet --disable-pip-version-check
	@touch $@

clean: ## remove .venv, .venv-launch, .venv-docs and caches; results, logs and checkpoints stay
	@rm -rf .venv .venv-launch .venv-docs site docs/recipe.md .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
