"""Rules of a run over time: its mirror, its variables, early stop, weight decay."""

import re
from collections.abc import Iterator

from grpo_mcore.layout import Finding
from grpo_mcore.recipe.errors import in_yaml, nearest_hint
from grpo_mcore.recipe.schema.master import RecipeSections

VALIDATION_METRICS = ("accuracy", "reward", "num_samples", "num_failed_samples", "generated_length", "truncation_rate")
"""Metrics of every validation, over all its data and per task (`TASK/accuracy`). With several samples a prompt there is
also pass@k, and with rewards that have parts reward/NAME."""


MIRRORS = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "file")
"""Schemes of checkpointing.mirror."""
SECRET_OPTIONS = re.compile("secret|token|password|sas|credential|service_account|(access|account)_?key", re.IGNORECASE)


def check_mirror(config: RecipeSections) -> Iterator[Finding]:
    """The mirror of the checkpoints is an address, without secrets: a recipe is copied into checkpoints and logs."""
    saving, key = config.checkpointing, "checkpointing.mirror"
    secret = "a recipe is copied into checkpoints and logs: give secrets in the environment, as AWS_SECRET_ACCESS_KEY"
    for name in filter(SECRET_OPTIONS.search, saving.mirror_options):
        yield Finding((f"{key}_options",), f"{name}: {secret}")
    if saving.mirror is None:
        return
    scheme, _, rest = saving.mirror.partition("://")
    if scheme not in MIRRORS or not rest.strip("/"):
        schemes = ", ".join(f"{scheme}://" for scheme in MIRRORS)
        yield Finding((key,), f"is no address such as s3://BUCKET/PREFIX; it may begin with {schemes}")
    elif "?" in rest or ":" in rest.partition("/")[0].rpartition("@")[0]:
        yield Finding((key,), f"holds more than bucket and prefix; {secret}")
    elif wrong := [sign for sign in "#%" if sign in rest]:
        others = "the checkpoints would lie under another prefix, maybe that of another run"
        yield Finding((key,), f"{wrong[0]} has a meaning of its own in an address: {others}; leave it out")


def check_webhook(config: RecipeSections) -> Iterator[Finding]:
    """Alarms go to a web address. It may hold a secret, so messages do not show it."""
    webhook = config.logger.alarms.webhook
    if webhook is not None and not re.match(r"https?://\w", webhook):
        yield Finding(("logger.alarms.webhook",), "expected an address that begins with https:// or http://")


VARIABLE = re.compile(r"[A-Za-z_*][A-Za-z0-9_*?]*")
SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE_KEY)", re.IGNORECASE)
"""Names of variables whose values are not for a recipe."""


def check_variables(config: RecipeSections) -> Iterator[Finding]:
    """cluster.env_vars must hold names, and texts that are no secrets."""
    for name, text in config.cluster.env_vars.items():
        if text is not None and (SECRET.search(name) or {"*", "?"} & set(name)):
            problem = "a secret does not belong in a recipe" if SECRET.search(name) else "a pattern has no value"
            yield Finding((f"cluster.env_vars.{name}",), f"{problem}; null takes the value of the shell")
        if not VARIABLE.fullmatch(name):
            yield Finding(
                ("cluster.env_vars",),
                f"expected names of environment variables, whose values come from the shell that starts the run, got "
                f"{in_yaml(name.partition('=')[0] + ('=...' if '=' in name else ''))}",  # it may be a secret
            )


def unknown_validation_metric(name: str, samples_per_prompt: int) -> str | None:
    """Return the error message for a metric (without `val:`) that no validation reports, None for a known one."""
    short, several = name.rpartition("/")[2], samples_per_prompt > 1
    if short in VALIDATION_METRICS or (several and re.fullmatch(r"pass@\d+", short)) or "reward/" in name:
        return None
    known = ", ".join((*VALIDATION_METRICS, "reward/NAME", *(["pass@k"] if several else [])))
    return f"there is no validation metric {in_yaml(name)}; known: {known}{nearest_hint(short, VALIDATION_METRICS)}"


def check_early_stop(config: RecipeSections) -> Iterator[Finding]:
    """Early stop needs a metric that validations report, and validations."""
    grpo, metric_key = config.grpo, "grpo.stop_at_validation_metric"
    if grpo.stop_at_validation_metric is None:
        return
    name = grpo.stop_at_validation_metric.removeprefix("val:")
    if reason := unknown_validation_metric(name, grpo.val_num_generations_per_prompt):
        yield Finding((metric_key,), reason)
    if not config.data.validation and not any(entry.split_validation_size for entry in config.data.train):
        yield Finding((metric_key, "data.validation"), "there is nothing to validate on: set data.validation")


def check_weight_decay(config: RecipeSections) -> Iterator[Finding]:
    """The weight decay rises from its start to its end, or stays; Megatron-Core reads these two, and a weight_decay
    beside them says nothing else."""
    optimizer, scheduler = config.policy.megatron_cfg.optimizer, config.policy.megatron_cfg.scheduler
    key, prefix = "policy.megatron_cfg.optimizer.weight_decay", "policy.megatron_cfg.scheduler."
    keys = (prefix + "start_weight_decay", prefix + "end_weight_decay")
    start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
    if start > end:
        yield Finding((*keys, key), f"{start:g} is above {keys[1]} = {end:g}; weight decay may only rise")
    elif start != end and scheduler.weight_decay_incr_style == "constant":
        message = f"{start:g} is not {keys[1]} = {end:g}, and {prefix}weight_decay_incr_style is constant; set linear"
        yield Finding((*keys, prefix + "weight_decay_incr_style"), message)
    elif "weight_decay" in optimizer.model_fields_set and not start <= optimizer.weight_decay <= end:
        between = f"{start:g}" if start == end else f"{start:g} to {end:g}"
        message = f"{optimizer.weight_decay:g} contradicts {keys[0]} and {keys[1]}, which say {between}; set all alike"
        yield Finding((key, *keys), message)
