"""`cluster`: nodes, deadlines and environment variables of the workers. `launch`: the cluster job of a run. Values of
one site belong on the command line, or in a recipe that inherits."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from grpo_mcore.recipe.schema.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    VariableText,
)


def _by_name(value: Any) -> Any:
    """Return a list of names of variables as a mapping."""
    return dict.fromkeys(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value


class ClusterConfig(Section):
    """`cluster`."""

    backend: Literal["ray", "local"] = "ray"
    """ray: workers are Ray actors. local: everything runs in this process, with one rank, for a debugger."""
    platform: Literal["auto", "cpu", "gpu"] = "auto"
    """Device of policy and engines. auto: GPUs if there are any."""
    num_nodes: Positive = 1
    """Number of nodes."""
    gpus_per_node: Positive = 1
    """GPUs of each node, one policy rank each. On CPU: policy processes of each node."""
    start_timeout_s: PositiveFloat = 1800.0
    """Seconds within which all workers and engines must have started. The first start on a GPU machine compiles and
    captures the engines' kernels: many minutes for a large model, unless their caches are kept (docs/gpu.md)."""
    step_timeout_s: PositiveFloat = 3600.0
    """Maximum seconds of one phase of a step (generation, log-probs, training, refit, ...)."""
    max_engine_restarts: NonNegative = 3
    """Maximum number of engine deaths in a row without a finished group between them. Each engine is restarted and its
    prompts are generated again."""
    max_restarts: NonNegative = 0
    """Maximum number of restarts in a row without a new checkpoint between them: a run that loses a policy rank, Ray or
    the driver resumes from its newest checkpoint. Only with backend: ray."""
    retry_wait_s: NonNegativeFloat = 1.0
    """Seconds before the first retry after such a loss. Each further retry in a row waits twice as long, at most a
    minute."""
    env_vars: Annotated[dict[str, VariableText | None], BeforeValidator(_by_name)] = Field(default_factory=dict)
    """Environment variables of the driver, its workers and the job that launches them, by name: the text, or null for
    the value that the driver was started with. A list of names is a mapping of nulls. No other variables are copied to
    the workers, besides those that they need. Not for secrets: name those, with launch.k8s.secrets on Kubernetes."""


class SlurmConfig(Section):
    """`launch.slurm`."""

    account: Annotated[str, Field(pattern=r"^[^\s#]+$")] | None = None
    """Account that is charged."""
    partition: Annotated[str, Field(pattern=r"^[^\s#]+$")] | None = None
    """Partition. null: the site's default."""
    options: list[str] = Field(default_factory=list)
    """Further options of sbatch, such as "--qos=high". They replace those of the same name that follow from the recipe,
    and --mem-per-cpu replaces --mem."""


class KubernetesConfig(Section):
    """`launch.k8s`."""

    namespace: str | None = None
    """Namespace. null: the current one when the manifest is applied."""
    service_account: str | None = None
    """Service account of the pods."""
    image_pull_secrets: list[str] = Field(default_factory=list)
    """Secrets that pull the image."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the driver taken from secrets: name -> "SECRET/KEY", such as HF_TOKEN: hf/token."""
    volume_claim: str | None = None
    """PersistentVolumeClaim (ReadWriteMany) that all pods mount: checkpoints, logs, data, model cache."""
    volume_path: str = "/shared"
    """Mount point of the volume. It is also the working directory, to which relative paths refer."""
    scheduler: Literal["none", "kueue", "volcano", "yunikorn", "kai"] = "none"
    """Gang scheduler, which starts all pods of a job together or none."""
    queue: str | None = None
    """Queue of the gang scheduler."""
    priority_class: str | None = None
    """PriorityClass of the pods."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which accelerator pods run."""
    tolerations: list[dict[str, Any]] = Field(default_factory=list)
    """Taints that the pods tolerate besides nvidia.com/gpu, as Kubernetes writes them: {key, value, effect, ...}."""
    affinity: dict[str, Any] = Field(default_factory=dict)
    """Affinity of the pods, as Kubernetes writes it: {podAffinity: ...}, such as to one rack or NVLink domain."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods."""
    volumes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Further volumes of all pods: mount point -> source as Kubernetes writes it, such as
    /scratch: {hostPath: {path: /local}}."""
    run_as_user: Positive | None = None
    """User and group of the pods' processes, which own what they write to the volumes. null: the image's user."""
    rdma_resource: str | None = None
    """Extended resource of the RDMA device plugin, such as rdma/hca_shared_devices_a. null: no RDMA."""
    rdma_count: Positive = 1
    """Units of rdma_resource for each pod."""
    host_network: bool = False
    """Give pods the node's own network, which some RDMA installations need."""
    network_policy: bool = True
    """Render a NetworkPolicy: the job's pods take connections from each other, and from the whole cluster those to
    Ray's dashboard, which the KubeRay operator asks, and to the metrics of logger.prometheus_enabled. Has no effect
    with host_network."""
    pod_monitor: bool = False
    """Render a PodMonitor for logger.prometheus_enabled. It needs the Prometheus operator."""
    shm_gb: Positive = 64
    """Size of /dev/shm in GiB. It counts towards the pod's memory."""
    gcs_redis_address: str | None = None
    """HOST:PORT of a Redis that keeps Ray's state, so that the head pod may be restarted. null: a lost head pod costs a
    restart from the checkpoint."""
    gcs_redis_secret: str | None = None
    """Password of that Redis, as "SECRET/KEY"."""


class LaunchConfig(Section):
    """`launch`."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=40)] | None = None
    """Name of the job. null: from the recipe's file name."""
    container: str | None = None
    """Image with its tag or digest. Slurm runs it with pyxis; null runs on bare metal."""
    mounts: list[str] = Field(default_factory=list)
    """Folders of the nodes that a Slurm container sees: "FROM:TO" or "FROM:TO:ro"."""
    time_limit: Annotated[str, Field(pattern=r"^(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d$")] | None = None
    """Wall-clock limit of the job: "HH:MM:SS" or "D-HH:MM:SS". null: what `plan` predicts for the run and half as much
    again, but at most four hours, after which the next job resumes; four hours where it cannot tell."""
    save_before_end_s: Positive = 600
    """Seconds before the time limit at which the run is asked to end its step and save. Must be longer than the longest
    step and a checkpoint together."""
    max_restarts: NonNegative = 3
    """Maximum number of times that a job which lost something or ran out of time resumes from its checkpoint. On Slurm
    preemptions and nodes that Slurm itself finds lost do not count."""
    cpus_per_node: Positive = 64
    """CPU cores of each node."""
    memory_gb_per_node: Positive | None = None
    """Memory of each node in GiB, /dev/shm included. null: what `plan` predicts, and a quarter more; 512 on CPU and
    where the model is not known."""
    code: list[str] = Field(default_factory=list)
    """Files and folders of your own below the working directory that the run imports, such as my_rewards.py. On
    Kubernetes they travel with the recipe, at most 1 MB of text; on Slurm the nodes must see the working directory."""
    stage_to: Annotated[str, Field(pattern=r"^/[^\s:,']*$")] | None = None
    """Folder on each node's own disk, to which every node copies the models from the hub's cache before Ray starts
    (`grpo-mcore prefetch --stage`): they are read from there. On Kubernetes it lies on one of launch.k8s.volumes."""
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    """Settings for Slurm only."""
    k8s: KubernetesConfig = Field(default_factory=KubernetesConfig)
    """Settings for Kubernetes only."""
