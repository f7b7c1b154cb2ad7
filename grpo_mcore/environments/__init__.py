"""Environments score what a policy says. `create_env` builds one by name; the interface is in `interfaces.py`.

Imports stay light here, without torch and Ray: verifier processes import this package.
"""

from grpo_mcore.environments.registry import create_env, create_env_class, register_env
