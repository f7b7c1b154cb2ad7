"""The error of a recipe's section for an environment. Verifier processes import it, so it does without pydantic."""


class EnvironmentConfigError(ValueError):
    """An environment's name or its `env.<name>` section is wrong."""
