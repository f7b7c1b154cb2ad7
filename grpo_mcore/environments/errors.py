"""The error of a recipe's section for an environment. Verifier processes import it, so it does without pydantic."""

from __future__ import annotations


class EnvironmentConfigError(ValueError):
    """An environment's name or its `env.<name>` section is wrong."""
