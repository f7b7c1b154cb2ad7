"""Rehearse a run in virtual time: the real driver against modelled workers.

`rehearse.py` runs a recipe; `engine.py`, `policy.py` and `environment.py` are the models, whose durations come from
`durations.py`; `world.py` holds what they share. `faults.py` breaks things, `laws.py` checks what must hold all the
same, and `simulation.py` does both for small runs that a seed draws. docs/rehearse.md says how far to trust it.
"""
