"""The sections of a recipe as pydantic models: every key with its type, its default and its meaning."""
