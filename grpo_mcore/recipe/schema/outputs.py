"""`logger` and `checkpointing`: what a run writes."""

from typing import Annotated, Literal

from pydantic import Field

from grpo_mcore.recipe.schema.section import (
    CustomCode,
    FilledText,
    NonNegative,
    OffWhenNull,
    Positive,
    PositiveFloat,
    Section,
)


class WandbConfig(Section):
    """`logger.wandb`."""

    project: str | None = None
    """Project of Weights & Biases."""
    name: str | None = None
    """Name of the run in the project."""
    entity: str | None = None
    """User or team that owns the project."""


class MLflowConfig(Section):
    """`logger.mlflow`."""

    experiment_name: str | None = None
    """Experiment; it is made if it does not exist. null: grpo."""
    run_name: str | None = None
    """Name of the run. null: the run's log folder."""
    run_id: str | None = None
    """Run to go on in. null: a new one."""
    tracking_uri: str | None = None
    """Address of the tracking server, or sqlite:///FILE. null: MLFLOW_TRACKING_URI, or MLflow's own default."""
    artifact_location: str | None = None
    """Folder or address of a new experiment's artifacts. null: MLflow's default."""


class SwanLabConfig(Section):
    """`logger.swanlab`."""

    project: str | None = None
    """Project of SwanLab."""
    name: str | None = None
    """Name of the experiment in the project."""
    workspace: str | None = None
    """User or team that owns the project."""
    mode: Literal["cloud", "local", "offline", "disabled"] | None = None
    """Where SwanLab writes. null: SwanLab's default."""


class GpuMonitoringConfig(Section):
    """`logger.gpu_monitoring`."""

    collection_interval: PositiveFloat = 10.0
    """Seconds between two samples."""


class TensorBoardConfig(Section):
    """`logger.tensorboard`."""

    log_dir: str | None = None
    """Folder of the event files, inside the run's log folder. null: tensorboard."""


class PrometheusConfig(Section):
    """`logger.prometheus`: where a Prometheus server finds the latest metrics of the run."""

    host: str = "127.0.0.1"
    """Address of the driver's machine at which `/metrics` is served, such as that of the cluster's network. Whoever
    reaches it can read the metrics."""
    port: Annotated[int, Field(gt=0, le=65535)] = 9464
    """Port of the endpoint. If it is taken, the run continues and tries again."""


class AlarmsConfig(Section):
    """`logger.alarms`: what is done when a step's metrics look as if the run is spoilt."""

    webhook: str | None = None
    """Address that gets each alarm as a POST of JSON, with `text`, `run`, `step` and `kind`, such as a Slack webhook.
    null: the console and the summary alone."""
    band: str | None = None
    """File of the band that `grpo-mcore sweep --band` made of this recipe, or its path in a folder of recipes, such as
    bands/grpo-arithmetic-cpu.json: an alarm says early when the run goes otherwise. null: none."""
    stop_after: Positive | None = None
    """Number of steps in a row with the same alarm after which the run saves and stops (exit code 75). null: never."""


class GRPOLoggerConfig(Section):
    """`logger`. A JSONL file with all metrics is always written."""

    log_dir: FilledText = "logs"
    """Folder of the logs, relative to the working directory. Each run gets its own folder in it."""
    wandb_enabled: bool = False
    """Log to Weights & Biases."""
    tensorboard_enabled: bool = False
    """Log to TensorBoard."""
    mlflow_enabled: bool = False
    """Log to MLflow."""
    swanlab_enabled: bool = False
    """Log to SwanLab."""
    prometheus_enabled: bool = False
    """Serve the latest metrics for a Prometheus server to scrape."""
    monitor_gpus: bool = False
    """Log utilisation, memory and power of each node's GPUs, and its processors and memory, with each step, under the
    prefix `machine`. GPUs need the package nvidia-ml-py. A small worker on each node samples them."""
    num_val_samples_to_print: NonNegative = 0
    """Number of samples printed at each validation."""
    samples: Literal["all", "sampled", "none"] = "all"
    """Samples of training and validation that are written to the run's folder, with their tokens and log-probs, for
    `report`, `watch` and `replay`: all, those of four prompts of each step, or none."""
    max_samples_gb: PositiveFloat = 20.0
    """Size in 10^9 bytes of the training samples, above which every other of the older steps' files is deleted."""
    metrics_by: list[str] = Field(default_factory=list)
    """Columns of the rows by whose values GRPO's rewards and pass rates are reported, as `reward/by/COLUMN/VALUE` and
    `pass_rate/by/COLUMN/VALUE`. `task`: the dataset's name."""
    profile_steps: list[Positive] = Field(default_factory=list)
    """Steps that the ranks of policy and engines trace with torch's profiler, from refit to update, such as [3, 4]. The
    traces go to `profile` in the run's folder, and into `report --trace`."""
    alarms: Annotated[AlarmsConfig, OffWhenNull] = Field(default_factory=AlarmsConfig)
    """What is done when engine and policy disagree, rewards are all equal, samples fail, or the policy stands still."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Destination of wandb_enabled."""
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    """Destination of tensorboard_enabled."""
    prometheus: Annotated[PrometheusConfig, OffWhenNull] = Field(default_factory=PrometheusConfig)
    """Endpoint of prometheus_enabled."""
    custom: list[CustomCode] = Field(default_factory=list)
    """Custom loggers, which get the same metrics: docs/extending.md."""
    mlflow: Annotated[MLflowConfig, OffWhenNull] = Field(default_factory=MLflowConfig)
    """Destination of mlflow_enabled."""
    swanlab: Annotated[SwanLabConfig, OffWhenNull] = Field(default_factory=SwanLabConfig)
    """Destination of swanlab_enabled."""
    gpu_monitoring: Annotated[GpuMonitoringConfig, OffWhenNull] = Field(default_factory=GpuMonitoringConfig)
    """How monitor_gpus samples."""


class CheckpointingConfig(Section):
    """`checkpointing`."""

    enabled: bool = True
    """Write checkpoints."""
    checkpoint_dir: FilledText = "results/grpo"
    """Folder of the checkpoints, relative to the working directory. It must be the same on all nodes."""
    metric_name: Annotated[str, Field(pattern=r"^(val|train):.+")] | None = "val:accuracy"
    """Metric that ranks checkpoints: "val:" or "train:" and its name. Graded rewards have no accuracy: their mean is
    taken in its place. null: the newest are kept."""
    higher_is_better: bool = True
    """A higher metric ranks higher."""
    keep_top_k: Positive | None = 3
    """Number of checkpoints to keep, by rank. The newest is always kept. null: all."""
    save_period: Positive = 10
    """Steps between two checkpoints."""
    save_optimizer: bool = True
    """Write the optimizer's state too, which is most of a checkpoint. false: a run that resumes has the weights as the
    model computes with them, in policy.precision, and moments of 0."""
    save_hf: Literal["last", "best", "all", "none"] = "none"
    """Kept checkpoints that `train` also writes in Hugging Face's format when it ends, as `hf_step_N` next to them: the
    newest, the best by metric_name, all or none. `sft` and `dpo` write their last weights as `hf`, unless
    checkpointing.enabled is false and this is none."""
    is_async: bool = False
    """Write a checkpoint during the steps that follow it: training waits only until the values are copied. A run that
    dies may lose the checkpoint that was being written. false: training waits until it is written."""
    checkpoint_must_save_by: Annotated[str, Field(pattern=r"^\d+:\d\d:\d\d:\d\d$")] | None = None
    """Time after its start, "DD:HH:MM:SS", at which a run finishes its step, saves and ends. Leave room for the longest
    step and a save. null: no limit."""
    ft_save_period: Positive | None = None
    """Steps between further checkpoints, for recovery from a crash. They do not compete for keep_top_k. null: none."""
    ft_keep_latest_k: Positive | None = None
    """Number of newest checkpoints to keep, whatever they were saved for and however they rank. null: 1."""

    mirror: str | None = None
    """Address in an object store to which each checkpoint is copied in the background, with the ledger and the run's
    log: s3://BUCKET/PREFIX, gs://, az://, or file:///FOLDER. `--resume` takes the newest checkpoint from there where
    checkpoint_dir has none or an older one. Each run needs a prefix of its own. Credentials come from the environment
    (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...). null: none."""
    mirror_options: dict[str, str] = Field(default_factory=dict)
    """Settings of the object store that are no secrets, by obstore's names, such as region, endpoint or
    virtual_hosted_style_request."""
    mirror_wait_s: PositiveFloat = 600.0
    """Seconds that the end of a run waits for the mirror while nothing can be copied. An upload that goes on is waited
    for."""

    @property
    def seconds_to_save_by(self) -> int | None:
        """checkpoint_must_save_by in seconds."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = map(int, self.checkpoint_must_save_by.split(":"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
