"""Configure jobs for NeMo-Run: `run.Config` of a recipe, of its script and of the executor that runs it."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import nemo_run as run
from nemo_run.core.execution.slurm import SlurmJobDetails

from grpo_mcore.tools.launch import LaunchSpec, nemo_run
from grpo_mcore.tools.launch.spec import Target

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@dataclass
class Job:
    """A recipe, as a path or the name of one in recipes/, and overrides as on grpo-mcore's command line."""

    recipe: str
    overrides: list[str] = field(default_factory=list)


def register_recipes() -> None:
    """Register a factory for every file in recipes/: grpo-llama3.1-8B-2n8g.yaml is job=grpo_llama3_1_8B_2n8g."""
    for file in RECIPES.rglob("*.yaml"):
        name = re.sub(r"\W", "_", str(file.relative_to(RECIPES).with_suffix("")))
        run.cli.factory(_factory(file), name=name)


def _factory(file: Path) -> Callable[[], run.Config[Job]]:
    def job() -> run.Config[Job]:
        return run.Config(Job, recipe=os.path.relpath(file))

    return job


@dataclass(kw_only=True)
class OneLog(SlurmJobDetails):
    """Tells NeMo-Run that Slurm itself writes the job's output to one file."""

    @property
    def ls_term(self) -> str:
        return os.path.join(self.folder or "", "sbatch_*_%j.out")


def script(spec: LaunchSpec, to: Target) -> run.Config[run.Script]:
    return run.Config(run.Script, inline=nemo_run.script(spec, to))


def executor(spec: LaunchSpec, to: Target) -> run.Config[run.Executor]:
    """Return the executor. For Kubernetes it is the local one: what runs here is kubectl."""
    if to != "slurm":
        return run.Config(run.LocalExecutor)
    return run.Config(
        run.SlurmExecutor,
        **nemo_run.slurm_fields(spec),
        job_details=run.Config(OneLog),
        packager=run.Config(run.Packager),  # copies no code: it is on the shared disk or in the image
        tunnel=run.Config(run.LocalTunnel, job_dir=""),
        poll_estimated_start_time=False,
    )
