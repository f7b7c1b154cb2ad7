"""Rehearse a run in virtual time: the real driver against modelled workers.

`rehearse.py` runs a recipe; `modelled_engine.py`, `modelled_policy.py` and `modelled_environment.py` are the models,
whose durations come from `durations.py`; `world.py` holds what they share, and `faults.py` breaks things. Small runs
that a seed draws, and the laws that must hold whatever breaks, are in tests/simulation/. docs/rehearse.md says how far
to trust it.
"""
