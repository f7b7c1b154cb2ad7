"""Render a job as an sbatch script."""

import re
import shlex
from pathlib import Path

from grpo_mcore.tools.launch.spec import LaunchSpec
from grpo_mcore.tools.launch.validation import gpus_of, split_option

BODY = Path(__file__).with_name("slurm_body.sh")

PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "VIRTUAL_ENV", "PYTHONPATH", "OMP_NUM_THREADS")
"""Variables of the submitting shell that every job inherits, in addition to the script's settings and those that the
recipe names."""

SETTINGS = ("CONTAINER", "MOUNTS", "COMMAND", "RESTARTS", "LOGS", "PYTHON", "START_TIMEOUT", "STAGE_TO")
OTHERS = ("RAY_PORT", "HEAD_IP", "OBJECT_STORE_GB")


def sbatch_script(spec: LaunchSpec) -> str:
    """Return the script: sbatch's options, the settings with their values, and the body that all jobs share."""
    recipe = re.sub(r"\s", " ", spec.recipe_file)  # a line break in a file's name would end the comment
    head = [
        "#!/bin/bash",
        f"# {recipe} on Slurm. Written by: grpo-mcore launch slurm {recipe} --dry-run",
        "#",
        "# Usage: sbatch FILE, from a shell in which `grpo-mcore` is in PATH, or with a container (pyxis):",
        '#   CONTAINER=image.sqsh MOUNTS="$PWD:$PWD" COMMAND="grpo-mcore train ... --resume=auto" sbatch FILE',
        "# Options on sbatch's own command line override those below.",
        *[sbatch_line(name, value) for name, value in all_options(spec)],
    ]
    return "\n".join([*head, job_script(spec)])


def all_options(spec: LaunchSpec) -> list[tuple[str, str]]:
    """Return name and value of sbatch's options for a job: those that follow from the recipe, then the site's own."""
    ours = [(name, str(value)) for name, value in sbatch_options(spec).items()]
    return [*ours, *map(split_option, spec.launch.slurm.options)]


def sbatch_command(spec: LaunchSpec) -> list[str]:
    """Return the command that submits the script from its standard input. It repeats the script's options: sbatch puts
    variables of the shell, such as SBATCH_ACCOUNT and SBATCH_EXPORT, above what a script says."""
    return ["sbatch", *(f"--{name}={value}" if value else f"--{name}" for name, value in all_options(spec))]


def sbatch_line(name: str, value: str) -> str:
    """Return an option as a script has it: sbatch takes a space for the end of an option, and # for a comment."""
    if re.search(r"[\s#'\"\\]", value):
        escaped = re.sub(r'(["\\])', r"\\\1", value)
        value = f'"{escaped}"'
    return f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"


REPLACED = {"mem-per-cpu": "mem", "mem-per-gpu": "mem", "cpus-per-gpu": "cpus-per-task", "no-requeue": "requeue"}
"""Options of launch.slurm.options that exclude one of ours."""


def job_script(spec: LaunchSpec) -> str:
    """Return the script without sbatch's options. It carries the resolved recipe, and says which code it was made by: a
    job that starts again after days trains what was submitted, whatever has happened to the file."""
    settings = {
        "CONTAINER": spec.launch.container or "",
        "MOUNTS": ",".join(spec.launch.mounts),
        "COMMAND": shlex.join(spec.command("RECIPE")).replace(" RECIPE", ' "$RECIPE"', 1),
        "RESTARTS": str(spec.restarts),
        "START_TIMEOUT": str(spec.start_timeout_s),
        "STAGE_TO": spec.launch.stage_to or "",
    }
    end = "END_OF_RECIPE"
    while end in spec.recipe_yaml.splitlines():
        end += "_"
    lines = [
        "",
        "# Settings: a variable of the same name in the submitting shell overrides the value. More are below.",
        *[f"[[ -n ${{{key}:-}} ]] || {key}={shlex.quote(value)}" for key, value in settings.items() if value],
        *[f"export {name}={shlex.quote(value)}" for name, value in spec.variables.items()],
        f"CODE={shlex.quote(spec.code)}",
        "resolved_recipe() {",
        f"    cat <<'{end}'",
        spec.recipe_yaml.rstrip(),
        end,
        "}",
        "",
    ]
    return "\n".join([*lines, BODY.read_text(encoding="utf-8")])


def sbatch_options(spec: LaunchSpec) -> dict[str, str | int]:
    """Return sbatch's long options for a job; the value "" is an option without a value."""
    gpus = max(pool.gpus_per_node for pool in spec.pools)
    passed = dict.fromkeys((*PASSED, *SETTINGS, *OTHERS, *spec.from_submitter))
    options: dict[str, str | int | None] = {
        "job-name": spec.name,
        "account": spec.launch.slurm.account,
        "partition": spec.launch.slurm.partition,
        "nodes": spec.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus or None,
        "cpus-per-task": spec.launch.cpus_per_node,
        "mem": f"{spec.memory_gb}G",
        "time": spec.time_limit,
        "signal": f"B:USR1@{spec.launch.save_before_end_s}",
        "requeue": "" if spec.restarts else None,
        "no-requeue": None if spec.restarts else "",
        "open-mode": "append",
        "output": "%x-%j.out",
        "export": ",".join(passed),
    }
    by_site = dict(map(split_option, spec.launch.slurm.options))
    replaced = by_site.keys() | {REPLACED[name] for name in by_site.keys() & REPLACED.keys()}
    if gpus_of("gres", by_site.get("gres", "")) is not None:
        replaced.add("gpus-per-node")
    return {key: value for key, value in options.items() if value is not None and key not in replaced}
