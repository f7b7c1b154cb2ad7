"""`MasterConfig`: a whole recipe as one typed object whose values go together."""

from __future__ import annotations

from typing import Any, Self

from grpo_mcore.recipe.loading.yaml_tree import Node
from grpo_mcore.recipe.schema.master import RecipeSections
from grpo_mcore.recipe.validation.validate import validated


class MasterConfig(RecipeSections):
    """A whole recipe. `model_validate(dict)` accepts both data layouts and makes every check of `load_recipe`; the
    constructor checks keys and types only."""

    @classmethod
    def model_validate(cls, obj: Any, **_options: Any) -> Self:
        """Return the configuration of a plain dict. Raises RecipeError with all problems."""
        return obj if isinstance(obj, cls) else validated(cls, Node.of(obj, ""))[0]
