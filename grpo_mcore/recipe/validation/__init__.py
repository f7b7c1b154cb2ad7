"""Checks of a recipe: keys of NeMo RL, unsupported keys, and what must hold between keys, by topic."""
