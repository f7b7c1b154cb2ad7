"""Describe a job for NeMo-Run's executors in plain values and text. Only launchers/nemo_run imports NeMo-Run itself."""

import shlex
from pathlib import Path
from typing import Any

from grpo_mcore.tools.launch.kubernetes import manifest
from grpo_mcore.tools.launch.slurm import job_script, sbatch_options
from grpo_mcore.tools.launch.spec import LaunchSpec, Target
from grpo_mcore.tools.launch.validation import split_option

TASK = "train"
"""Name of the task; NeMo-Run names its script after it."""

SET_BY_NEMO_RUN = ("job-name", "requeue", "no-requeue", "output")
FIELDS = ("account", "partition", "nodes", "gpus-per-node", "cpus-per-task", "mem", "time", "signal", "open-mode")

KUBECTL = Path(__file__).with_name("kubectl_body.sh")

LOCAL = """\
set -euo pipefail
if ! command -v grpo-mcore >/dev/null; then
    echo "there is no grpo-mcore in PATH: activate the environment that trains (source .venv/bin/activate)" >&2
    exit 127
fi
"""


def script(spec: LaunchSpec, target: Target) -> str:
    """Return the content of `run.Script`: for Slurm the batch script, for Kubernetes kubectl with the manifest."""
    match target:
        case "slurm":
            return job_script(spec)
        case "k8s":
            namespace = f" --namespace={spec.launch.k8s.namespace}" if spec.launch.k8s.namespace else ""
            text = KUBECTL.read_text(encoding="utf-8").replace("@NAMESPACE@", namespace)
            return text.replace("@MANIFEST@\n", manifest(spec))
        case "local":
            variables = [f"export {name}={shlex.quote(value)}\n" for name, value in spec.variables.items()]
            command = shlex.join(spec.command(spec.recipe_file, spec.overrides))
            return "".join([LOCAL, *variables, f"exec {command}\n"])


def slurm_fields(spec: LaunchSpec) -> dict[str, Any]:
    """Return the fields of `run.SlurmExecutor`.

    NeMo-Run's batch script starts every task with srun. Ours starts its own sruns and must receive Slurm's signals, so
    NeMo-Run's script replaces itself by ours (`exec`) in its setup lines.
    """
    options = sbatch_options(spec)
    further = {key: value for key, value in options.items() if key not in (*FIELDS, *SET_BY_NEMO_RUN)}
    further |= map(split_option, spec.launch.slurm.options)
    # NeMo-Run always submits with --requeue.
    stay = [] if spec.restarts else ['scontrol update jobid="$SLURM_JOB_ID" requeue=0']
    return {
        **{_field(key): options.get(key) for key in FIELDS},
        "ntasks_per_node": further.pop("ntasks-per-node"),
        "job_name_prefix": f"{spec.name}.",
        "additional_parameters": {_field(key): value if value != "" else True for key, value in further.items()},
        "setup_lines": "\n".join([*stay, f"exec bash /nemo_run/scripts/{TASK}.sh"]),
    }


def _field(option: str) -> str:
    return option.replace("-", "_")
