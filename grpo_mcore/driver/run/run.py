"""A run from its recipe: `prepare` checks all that can be checked in seconds, `open_run` starts it and ends it again.

Every command that trains, validates, evaluates or collects goes through `prepare`. Training runs then hold their
checkpoint folder, their log, their cluster and their workers in one block, `with open_run(prepared) as run`; what only
samples a model has engines and environments, `with open_sampler(prepared, logs) as sampler`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_mcore.base.clock import REAL, Clock
from grpo_mcore.base.processes import rare_collections
from grpo_mcore.base.stopping import StopRequest, on_sigterm
from grpo_mcore.cluster import Cluster
from grpo_mcore.data import (
    TaskData,
    TurnTemplate,
    build_dataloader,
    build_task_data,
    build_train_dataloader,
    check_same_tokens,
    check_token_ids,
    load_preference_dataset,
    load_tokenizer,
    say_other_ends,
)
from grpo_mcore.data.processors import longest_prompt
from grpo_mcore.driver.checkpoints.checkpoint_files import POLICY, GRPOSaveState, first_save_state, policy_folder
from grpo_mcore.driver.checkpoints.checkpoints import CheckpointManager, step_of
from grpo_mcore.driver.engines.engine_group import EngineGroup
from grpo_mcore.driver.engines.policy_endpoint import open_endpoint
from grpo_mcore.driver.interfaces import ColocatablePolicyInterface, GenerationInterface
from grpo_mcore.driver.policy.refit_step import refit_engines
from grpo_mcore.driver.policy.teachers import check_aliases
from grpo_mcore.driver.record.followed_run import FollowedRun
from grpo_mcore.driver.record.run_output import left_out_if_it_fails
from grpo_mcore.driver.record.sample_writer import SampleWriter
from grpo_mcore.driver.rollouts.prompt_stream import check_same_data
from grpo_mcore.driver.rollouts.scoring import EnvironmentWorker
from grpo_mcore.driver.rollouts.validation import run_validation
from grpo_mcore.driver.run.checks import (
    Model,
    SetupError,
    check_checkpointing,
    check_model,
    check_run,
    check_writable,
    choose_precision,
    image_reader,
    warn_of_schedule,
)
from grpo_mcore.driver.run.environment_checks import CHECKED_ROWS, check_columns, check_environments
from grpo_mcore.driver.run.setup import (
    make_loss,
    start_cluster,
    start_engines,
    start_environments,
    start_policy,
    start_policy_and_engines,
    start_teachers,
    wait_until_ready,
    watch_machines,
)
from grpo_mcore.observe import Logger, RunConsole, messages_kept, write_summary
from grpo_mcore.observe.exit_codes import RunEnd
from grpo_mcore.observe.run_folder import read_object
from grpo_mcore.parallel.policy import LossFn
from grpo_mcore.recipe import (
    FINE_TUNING,
    Algorithm,
    Change,
    FineTuningConfig,
    MasterConfig,
    exports_model,
    samples_together,
    settle_algorithm,
)
from grpo_mcore.rollout.images import ImageReader

logger = logging.getLogger(__name__)


@dataclass
class Prepared:
    """A run whose recipe, model, data and folders are checked. Nothing is started yet.

    `changes`: values of the recipe that differ from those of the checkpoint that it resumes. `trains`: it holds its
    checkpoint folder, as no other run may train there. An evaluation has no data loaders. `follow`: the run whose
    samples it trains on, without engines and environments.
    """

    config: MasterConfig
    algorithm: Algorithm
    model: Model
    checkpointer: CheckpointManager
    tokenizer: Any
    data: TaskData
    changes: Sequence[Change]
    dataloader: Any = None
    val_dataloader: Any = None
    trains: bool = True
    follow: FollowedRun | None = None

    @property
    def env_names(self) -> dict[str, str | None]:
        """Environment of each task."""
        return self.data.env_names | self.data.val_env_names

    def steps_left(self) -> int:
        """Return the number of steps that are left to do."""
        folder = self.checkpointer.resumed_from
        done = self.checkpointer.read(folder)[0]["current_step"] if folder else 0
        return max(self.config[self.algorithm].max_num_steps - done, 0)


def prepare(
    config: MasterConfig,
    resume: str | bool | None = None,
    *,
    algorithm: Algorithm = "grpo",
    trains: bool = True,
    tokenizer: Any = None,
    data: TaskData | None = None,
    follow: FollowedRun | None = None,
    starts: bool = True,
) -> Prepared:
    """Check all that can be checked in seconds: what is wrong with the model, the data, the checkpoint, the rewards or
    the folders shows before anything starts.

    `algorithm`: the algorithm that runs; "eval" is whatever samples a model and trains nothing. `trains`: no other run
    may train in the checkpoints' folder. `tokenizer`, `data`: those of the caller, in place of the recipe's. `follow`:
    the run that this one follows. `starts`: a run follows; without it, damaged checkpoints keep their names.
    """
    fine_tunes = algorithm in FINE_TUNING
    if algorithm != "eval":
        settle_algorithm(config, algorithm)
    checkpointer, changes = CheckpointManager(config.checkpointing), list[Change]()
    if (algorithm == "rm") != (config.policy.head == "value"):
        raise SetupError(
            "policy.head: a recipe with a section rm, and none for grpo or dpo, trains a reward model, by `grpo-mcore "
            "rm` alone; all else needs the logits of tokens"
        )
    if algorithm != "eval":
        check_checkpointing(config, algorithm)
    if follow is not None:
        follow.check(config)
    model = check_model(config) if fine_tunes else check_run(config)
    if algorithm != "eval":
        models = _models_written(config, algorithm) if trains else ()
        checkpointer.open(resume, trains=trains, models=models, renames=trains and starts)
        if trains:
            checkpointer.check_algorithm(algorithm)
    choose_precision(config, model.platform, checkpointer.resumed_from)
    if algorithm != "eval":
        changes = checkpointer.changes(config)
        check_writable(config, checkpointer.log_run() if trains else None, keep=starts)
    if tokenizer is None:
        names = config.policy.tokenizer
        tokenizer = load_tokenizer(names.name, names.chat_template, names.chat_template_kwargs)
    check_token_ids(tokenizer, config.policy.tokenizer.name, model.shape.vocab_size, config.policy.model_name)
    say_other_ends(tokenizer, Path(model.folder))
    if beyond := [end for end in config.policy.generation.stop_token_ids or () if end >= model.shape.vocab_size]:
        raise SetupError(
            f"policy.generation.stop_token_ids: {beyond[0]} is no token of the model, which has 0 to "
            f"{model.shape.vocab_size - 1}: no answer would end with it"
        )
    for teacher in model.teachers.values():
        check_same_tokens(tokenizer, load_tokenizer(teacher.folder, tokenizer.chat_template), teacher.folder)
    limit = None if algorithm in FINE_TUNING else config.policy.generation.vllm_cfg.limit_mm_per_prompt.image
    images = image_reader(config, model, limit)
    data = data or _load_data(config, algorithm, tokenizer, images)
    prepared = Prepared(config, algorithm, model, checkpointer, tokenizer, data, changes, trains=trains, follow=follow)
    if algorithm == "grpo" and model.teachers:
        check_aliases(config.on_policy_distillation, data.first_rows(CHECKED_ROWS, validation=False))
    if algorithm == "grpo" and prepared.env_names:
        check_environments(config, prepared.env_names, data.first_rows(CHECKED_ROWS))
        check_columns(config, data.first_rows(CHECKED_ROWS, validation=False))
    if algorithm != "eval":  # raises where the data has too few rows, or others than the run that is resumed
        prepared.dataloader, prepared.val_dataloader = _build_loaders(config, algorithm, data)
        endless = config.data.use_multiple_dataloader
        warn_of_schedule(config, algorithm, None if endless else len(prepared.dataloader))
        if (position := checkpointer.position()) is not None:
            check_same_data(position.stream, prepared.dataloader)
    if algorithm == "grpo" and config.grpo.max_rollout_turns > 1:
        TurnTemplate(tokenizer, images)  # raises where the chat template cannot hold several turns
    return prepared


def _models_written(config: MasterConfig, algorithm: Algorithm) -> Sequence[str]:
    """Return the names (patterns) of the models that the run writes beside its checkpoints when it ends."""
    if algorithm in FINE_TUNING:
        return ("hf",) if exports_model(config) else ()
    return () if config.checkpointing.save_hf == "none" else ("hf_step_*",)


def _load_data(
    config: MasterConfig, algorithm: Algorithm, tokenizer: Any, images: ImageReader | None = None
) -> TaskData:
    fine_tunes = algorithm in FINE_TUNING
    longest = config.policy.max_total_sequence_length if fine_tunes else longest_prompt(config)
    share = config.data.max_unusable_share
    build = partial(
        build_task_data, config.data.train, config.data.validation, tokenizer, longest,
        max_unusable_share=share, images=images,
        stop_strings={
            name: stops for name, env in config.env.items() if isinstance(stops := env.get("stop_strings"), list)
        },
    )  # fmt: skip
    if algorithm == "grpo":
        return build(separate=config.data.use_multiple_dataloader)
    if algorithm == "eval":
        return build()
    default = "reward_model_processor" if algorithm == "rm" else "preference_processor"
    if samples_together(config, algorithm) == 2:
        return build(default, load=load_preference_dataset)
    return build(default if algorithm == "rm" else "sft_processor")


def _build_loaders(config: MasterConfig, algorithm: Algorithm, data: TaskData) -> tuple[Any, Any]:
    """Return the loaders of training and validation data, the latter None without validation data. Raises DataError
    for too few rows."""
    if algorithm == "grpo":
        size, seed = config.grpo.num_prompts_per_step, config.grpo.seed
        val_size = config.grpo.val_batch_size or (len(data.validation) if data.validation else 0)
    else:
        settings: FineTuningConfig = config[algorithm]
        size, seed, val_size = config.policy.train_global_batch_size, settings.seed, settings.val_global_batch_size
    loader = build_train_dataloader(data.train, config.data, size, seed)
    if data.validation is None:
        return loader, None
    return loader, build_dataloader(data.validation, val_size, False, seed, drop_last=False)


@dataclass
class Run:
    """A run that is started: the arguments of `grpo_train`, under their names. Those of FINE_TUNING have no engine, and
    no environments."""

    policy: ColocatablePolicyInterface
    policy_generation: GenerationInterface
    dataloader: Any
    val_dataloader: Any
    tokenizer: Any
    loss_fn: LossFn
    task_to_env: Mapping[str, Any]
    val_task_to_env: Mapping[str, Any] | None
    logger: Logger
    checkpointer: CheckpointManager
    grpo_save_state: GRPOSaveState
    master_config: MasterConfig

    def rows(self) -> list[int | None]:
        """Return the number of rows of training and validation data; None where there are none, or several loaders."""
        datasets = [getattr(loader, "dataset", None) for loader in (self.dataloader, self.val_dataloader)]
        return [None if dataset is None else len(dataset) for dataset in datasets]


@contextmanager
def open_run(
    prepared: Prepared,
    stop: StopRequest | None = None,
    *,
    clock: Clock = REAL,
    start_cluster: Callable[[MasterConfig, Path], Cluster] = start_cluster,
) -> Iterator[Run]:
    """Start a run, and end all that was started with the context: hold the checkpoint folder, open the log (that of
    the run that this one resumes, or a new one), start cluster and workers.

    `stop`: SIGTERM asks it to stop, also after Ray has installed a handler of its own. `clock`: the clock of the
    cluster which `start_cluster` starts. Raises what the workers' constructors raise.
    """
    config, checkpointer = prepared.config, prepared.checkpointer
    with ExitStack() as stack:
        if prepared.trains:
            stack.enter_context(checkpointer.held())
        log_run = checkpointer.log_run() if prepared.trains else None
        if log_run is not None:
            checkpointer.fetch_log(Path(config.logger.log_dir))
        log = stack.enter_context(Logger(config.logger, run=log_run, clock=clock))
        if prepared.trains:
            checkpointer.mirror_log(log)
        stack.enter_context(messages_kept(log.console))
        done = checkpointer.resumed_step() or 0
        run: Run | None = None
        stack.enter_context(_failure_recorded(log, checkpointer, lambda: done if run is None else run.policy.updates))
        starting = "policy and engines" if prepared.algorithm == "grpo" else "the policy"
        logger.info("starting %s (logs: %s) ...", starting, log.log_dir)
        started_at = clock.now()
        cluster = stack.enter_context(start_cluster(config, log.log_dir))
        if stop is not None:
            stack.enter_context(on_sigterm(stop))
        logger.info("  cluster: %s, ready after %.0f s", config.cluster.backend, clock.now() - started_at)
        run = start_run(prepared, cluster, log)
        stack.enter_context(closing(run.policy_generation))
        if config.cluster.backend == "ray":  # in process, the ranks' tensors are here too
            stack.enter_context(rare_collections())
        logger.info("  everything is ready after %.0f s", clock.now() - started_at)
        yield run


@contextmanager
def _failure_recorded(log: Logger, checkpointer: CheckpointManager, steps: Callable[[], int]) -> Iterator[None]:
    """Write summary.json also of a run that an error, Ctrl-C or a signal during its start ends. `steps`: returns the
    number of steps that are trained."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        newest = checkpointer.latest_if_readable() if checkpointer.config.enabled else None
        trained = steps()
        end = log.end = RunEnd.by(error, max(trained - (step_of(newest.name) if newest else 0), 0))
        path = log.log_dir / "summary.json"
        with left_out_if_it_fails(f"the summary {path}"):
            write_summary(path, {"steps": trained} | (read_object(path) or {}) | end.plain())
        raise


started = open_run
"""Its name in 0.1."""


def start_run(prepared: Prepared, cluster: Cluster, log: Logger) -> Run:
    """Start the workers of a run, and bring the policy to where the checkpoint left off, if the run resumes. Raises
    what the workers' constructors raise."""
    config, model, checkpointer = prepared.config, prepared.model, prepared.checkpointer
    environments: dict[str, EnvironmentWorker] = {}
    engines = EngineGroup(cluster, [], sleeps=False)
    generates = prepared.algorithm == "grpo" and prepared.follow is None
    if generates:
        environments = start_environments(config, cluster, prepared.env_names, prepared.tokenizer)
        policy, engines = start_policy_and_engines(config, cluster, model)
    else:
        policy = start_policy(config, cluster, model, prepared.algorithm)
        wait_until_ready(config, cluster, policy.workers, "start of the policy")
        start_teachers(config, cluster, model, policy)
    loss = make_loss(config, prepared.algorithm)
    save_state = first_save_state()
    if (folder := checkpointer.resumed_from) is not None:
        while problem := policy.damage(policy_folder(folder), checkpointer.policy_digests()):
            folder = checkpointer.pass_over(f"{POLICY}/{problem}")
        save_state = checkpointer.read(folder)[0]
        policy.load(policy_folder(folder))
        policy.updates = save_state["current_step"]
    if config.logger.monitor_gpus:
        watch_machines(config, cluster, log)
    if generates:
        engines.endpoint = open_endpoint(config, engines, Path(log.log_dir))
        workers = {env.worker.name: env.worker for env in environments.values()}  # tasks may share one
        wait_until_ready(config, cluster, list(workers.values()), "start of the environments")
    return Run(
        policy=policy,
        policy_generation=engines,
        dataloader=prepared.dataloader,
        val_dataloader=prepared.val_dataloader,
        tokenizer=prepared.tokenizer,
        loss_fn=loss,
        task_to_env=environments,
        val_task_to_env=environments,
        logger=log,
        checkpointer=checkpointer,
        grpo_save_state=save_state,
        master_config=config,
    )


def validate_only(config: MasterConfig, resume: str | bool | None = None) -> dict[str, float | None]:
    """Validate the model, or a checkpoint, as a run would, and return the metrics. No step is trained or saved."""
    with open_run(prepare(config, resume, trains=False)) as run:
        console, step = RunConsole(kept=run.logger.console), run.grpo_save_state["current_step"]
        refit_engines(run.policy, run.policy_generation, config)
        validation = run_validation(
            run.policy_generation, run.val_dataloader, run.val_task_to_env or {}, config, tokenizer=run.tokenizer
        )
        samples = SampleWriter(config.logger, run.logger.log_dir, run.policy.cluster, run.tokenizer)
        samples.validated(step, validation.groups)
        samples.close()
        run.logger.log_hyperparams(config)
        run.logger.log_metrics(validation.metrics | {"seconds": validation.seconds}, step, "validation")
        console.samples(step, validation.samples)
        console.validation(step, validation.metrics, validation.seconds)
        end = RunEnd("finished", f"validated after step {step}, nothing was trained", 0)
        path = run.logger.log_dir / "summary.json"
        write_summary(path, {"steps": step, "validation": validation.metrics} | end.plain())
    return validation.metrics


@dataclass
class Sampler:
    """Engines with the weights of a model, and the environments that score its samples. There is no policy."""

    cluster: Cluster
    engines: EngineGroup
    task_to_env: Mapping[str, EnvironmentWorker]


@contextmanager
def open_sampler(prepared: Prepared, log_dir: Path, env_names: Mapping[str, str | None]) -> Iterator[Sampler]:
    """Start engines and the environments of these tasks, and end them with the context. `log_dir`: folder of the
    workers' logs. Raises what `check_environments` raises, before anything is started, and what the workers'
    constructors raise."""
    config = prepared.config
    check_environments(config, env_names, prepared.data.first_rows(CHECKED_ROWS))
    with start_cluster(config, log_dir) as cluster:
        environments = start_environments(config, cluster, env_names, prepared.tokenizer)
        engines = start_engines(config, cluster, prepared.model, None)
        with closing(engines):
            workers = {env.worker.name: env.worker for env in environments.values()}
            wait_until_ready(
                config, cluster, [*engines.all_hosts(), *workers.values()], "start of engines and environments"
            )
            engines.endpoint = open_endpoint(config, engines, log_dir)
            yield Sampler(cluster, engines, environments)
