"""Checks of a recipe: types, unsupported keys, and what must hold between keys, by topic."""
