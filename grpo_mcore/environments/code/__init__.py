"""Programs in responses, run on a prompt's tests. `environment.py` is the environment."""
