"""One rank of the policy: the same object in process, under torchrun and as a Ray actor."""

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from grpo_mcore.base.files import Digest, first_changed, try_to_read
from grpo_mcore.base.host_memory import HostCopies
from grpo_mcore.base.torch_profile import ProcessProfile
from grpo_mcore.batching.packed_batch import PackedBatch
from grpo_mcore.families import (
    adapter_shape,
    check_context_parallel,
    check_images,
    check_settings,
    frozen_parts,
    is_trained,
    params_of,
    read_hf_config,
    shape_of,
)
from grpo_mcore.layout import LayoutError, fits
from grpo_mcore.objective import CombinedMetrics, combine_metrics, nonfinite_samples
from grpo_mcore.parallel.finite import (
    LARGE,
    NonFiniteState,
    all_finite,
    first_nonfinite,
    is_finite,
    largest_weight,
    state_tensors,
)
from grpo_mcore.parallel.layers.context import padded_length
from grpo_mcore.parallel.memory import (
    OptimizerOffload,
    WeightsOffload,
    accelerator,
    free_gradients,
    host_copies,
    resident_bytes,
)
from grpo_mcore.parallel.mesh import Address, join_mesh, leave_mesh
from grpo_mcore.parallel.platform import Platform, check_optimizer
from grpo_mcore.parallel.sample_gradients import backward_by_sample
from grpo_mcore.recipe import PolicyConfig, own_attention, policy_layout

LossFn = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


class NonFiniteLoss(FloatingPointError):
    """A loss or gradient is NaN or infinite; the message names the samples."""


@dataclass(frozen=True)
class TrainReport:
    """Result of one `train_step`. `metrics` are this data-parallel rank's share; only the last stage has any.

    `times`: unix times at which the forward pass of each micro-batch began, the update began, and the step ended. On a
    GPU they are of the host, which runs ahead of the device.
    """

    metrics: CombinedMetrics
    grad_norm: float
    learning_rate: float
    times: tuple[float, ...] = ()


class Policy:
    """A Megatron-Core model with its optimizer, on this rank of a mesh.

    Every method is collective: all ranks of the mesh call it, each with the micro-batches of its data-parallel rank.
    All ranks pass the same number of micro-batches.
    """

    reads_images = False
    tower: Any = None
    """A FrozenTower, where samples may have images and a layer of this rank takes features; whoever makes micro-batches
    lets it see their images first."""

    def __init__(
        self,
        config: PolicyConfig,
        address: Address,
        *,
        seed: int,
        timeout_s: float,
        reference: bool,
        platform: Platform | None = None,
        trains: bool = True,
        build_later: bool = False,
        images: bool = False,
        beside: bool = False,
    ) -> None:
        """`config.model_name` must be a local Hugging Face folder.

        `reference`: keep a copy of the initial weights for `reference_logprobs`. `platform`: detected if not given.
        `trains`: false for a teacher, whose weights stay as they are: it has neither gradients nor an optimizer.
        `images`: samples may have images, so the model's tower is loaded.
        `build_later`: take no memory, and join no mesh, before `build` is called. `beside`: share the mesh of another
        model of this process with the same layout. Raises what `build` raises.
        """
        self.config, self.seed, self.platform = config, seed, platform or Platform.detect()
        self._address, self._timeout_s, self._keeps_reference, self._trains = address, timeout_s, reference, trains
        self.reads_images, self._beside = images, beside
        if not build_later:
            self.build()

    def build(self) -> None:
        """Join the mesh, build the model and load its weights. Raises FamilyError, WeightsError, LayoutError,
        RendezvousError."""
        config, seed, reference = self.config, self.seed, self._keeps_reference
        address, timeout_s = self._address, self._timeout_s
        self.layout = policy_layout(config.megatron_cfg, address.world_size)
        self.shape = shape_of(read_hf_config(config.model_name, config.hf_config_overrides), config.head)
        if findings := fits(self.layout, address.world_size, self.shape):
            raise LayoutError(*findings)
        check_settings(self.shape, config.megatron_cfg)
        if self.reads_images:
            check_images(self.shape)
        # TransformerEngine's attention takes no positions on three axes.
        own = own_attention(config.sequence_packing) or self.reads_images
        self.platform = replace(self.platform, own_attention=own)
        check_context_parallel(self.shape, self.layout.context, fused_attention=self.platform.fused_attention)
        self.device = join_mesh(self.layout, address, seed, timeout_s, self.platform, beside=self._beside)
        try:
            self._build_on_mesh(config, seed, reference)
        except BaseException:
            leave_mesh()  # the process may build another one, as a run without Ray does
            raise

    def _build_on_mesh(self, config: PolicyConfig, seed: int, reference: bool) -> None:
        address = self._address
        self.here = self.layout.coordinates(address.rank)
        self.is_last_stage = self.here.pipeline == self.layout.pipeline - 1
        # Megatron-Core may be imported only after join_mesh has installed the CPU layer.
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from grpo_mcore.parallel.logprobs import Cut
        from grpo_mcore.parallel.model import build_model
        from grpo_mcore.parallel.weights.adapters import attach_adapters
        from grpo_mcore.parallel.weights.weights import ShardedWeights

        megatron = config.megatron_cfg
        check_optimizer(config, self.platform)
        self.dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.precision]
        replay = config.router_replay.enabled
        networks = build_model(self.shape, self.layout, megatron, self.dtype, self.platform, replay=replay)
        for network in networks:
            if self.device.type != "cpu":
                network.to(self.device)
            network.logprob_temperature = config.generation.temperature
            if config.generation.top_k is not None or config.generation.top_p < 1:
                network.logprob_cut = Cut(config.generation.top_k, config.generation.top_p)
            network.logprob_chunk = config.logprob_chunk_size or 1024
        self.weights = ShardedWeights(networks, self.shape, self.layout, self.here)
        if not self.platform.traced:
            self.weights.load_hf(config.model_name)
        if self.reads_images:
            self.tower = self._load_tower(networks)
        self.adapters = adapter_shape(megatron.peft)
        if self.adapters is not None:
            attach_adapters(networks, self.weights, self.adapters, megatron.peft.lora_A_init_method, seed)
            reference = False  # the reference is the network without its adapters
        self._reference: HostCopies | None = None
        self._set_aside: HostCopies | None = None  # the current weights during a pass with the reference's
        if reference:
            self._reference = host_copies(self.platform, _parameters(networks))
            self._reference.store(_parameters(networks))
        self.chunks: list[Any] = list(networks)
        if self._trains:
            self._prepare_training(networks)
        self._forward_backward = get_forward_backward_func()
        self._resident: dict[str, int] = {}
        self._offload: OptimizerOffload | WeightsOffload | None = None
        self._profile = ProcessProfile()
        self._saving: Any = None  # a BackgroundSave, created by the first save
        self._offloaded = False
        self.before_update: Callable[[], None] = lambda: None
        """Called in each `train_step` between the last backward pass and the optimizer, for measurements."""
        self._norm_by_sample = 0.0
        self.step_logprobs: list[Tensor] = []
        """Log-probs before the update of the last `train_step`'s micro-batches, [1, T] each; only on the last stage."""

    def _load_tower(self, networks: Sequence[Any]) -> Any:
        """Return the model's tower, None where no layer of this rank takes its features."""
        from grpo_mcore.parallel.weights.tower import FrozenTower

        takers = [network for network in networks if network.takes_features]
        if not takers or self.platform.traced:
            return None
        assert self.shape.vision is not None
        tower = FrozenTower(Path(self.config.model_name), self.shape.vision, self.dtype, self.device)
        for network in takers:
            network.tower_features = tower.features
        return tower

    def _prepare_training(self, networks: Sequence[Any]) -> None:
        """Give the model gradients, an optimizer and a schedule."""
        from megatron.core.distributed import finalize_model_grads

        from grpo_mcore.parallel.optimizer import build_scheduler, wrap_model

        megatron = self.config.megatron_cfg
        self.chunks = [wrap_model(network, megatron, self.platform) for network in networks]
        self.optimizer = self.build_optimizer()
        self.scheduler = build_scheduler(self.optimizer, megatron)
        schedule = networks[0].config  # one object for all chunks
        schedule.grad_scale_func = self.optimizer.scale_loss
        no_sync = [chunk.no_sync for chunk in self.chunks]
        schedule.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        # The loss is already normalised by global counts: pass no token count to divide by.
        schedule.finalize_model_grads_func = lambda model, num_tokens=None, **kw: finalize_model_grads(
            model, None, **kw
        )

    def build_optimizer(self) -> Any:
        """Return the optimizer of the chunks. A traced policy builds it in its own way (tools/plan/trace.py)."""
        from grpo_mcore.parallel.optimizer import build_optimizer

        return build_optimizer(self.chunks, self.config, self.platform)

    @property
    def row_multiple(self) -> int:
        """Packed rows must be padded to a multiple of this many tokens."""
        needed = self.layout.tensor if self.layout.sequence_parallel else 1
        return math.lcm(needed, self.config.make_sequence_length_divisible_by or 1)

    def logprobs(self, batches: Sequence[PackedBatch], *, dropout: bool = False) -> list[Tensor] | None:
        """Return each trained token's log-prob under the current weights: one float32 [1, T] per micro-batch; with a
        value head the value of what comes before the token, in its place.
        `dropout`: apply the adapters' dropout of this step, as in `train_step`.

        The tensors are on this device. Element t belongs to token t; tokens that are not trained on have 0.
        Returns None except on the last stage.
        """
        with self._evaluating(), self._dropout(dropout):
            outputs = self._run(batches, lambda batch, scored: (scored.sum(), {"logprobs": scored}), forward_only=True)
        return [output["logprobs"] for output in outputs] if self.is_last_stage else None

    def hidden_states(self, batches: Sequence[PackedBatch]) -> list[Tensor] | None:
        """Return what the output layer gets at the positions before trained tokens (`next_token_trained`): [trained
        tokens, hidden size] for each micro-batch, on this device. None except on the last stage."""
        with self._evaluating():
            outputs = self._run(
                batches, lambda batch, states: (states.sum(), {"hidden": states}), forward_only=True, wanted="hidden"
            )
        return [output["hidden"] for output in outputs] if self.is_last_stage else None

    def load_teacher_head(self, folder: str | Path) -> None:
        """Load the rows of a teacher's output layer for the tokens of this rank, for a loss over whole distributions.
        `folder`: the teacher's Hugging Face folder. Only the last stage holds them."""
        from grpo_mcore.parallel.weights.hf_folder import SafetensorsFolder

        if not self.is_last_stage:
            return
        shape = shape_of(read_hf_config(folder))
        (head,) = next(param.hf for param in params_of(shape) if param.megatron == "output_layer.weight")
        rows = self.shape.padded_vocab_size(self.layout.tensor) // self.layout.tensor
        start = self.here.tensor * rows
        stop = max(start, min(start + rows, shape.vocab_size))
        network = _unwrap(self.chunks[-1])
        values = SafetensorsFolder(Path(folder)).read(head.name, ((start, stop), (0, shape.hidden_size)))
        network.teacher_head = values.to(self.device, self.dtype)
        network.teacher_vocab = shape.vocab_size

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor] | None:
        """Return the same as `logprobs`, under the weights that the policy started from."""
        with self._reference_weights():
            return self.logprobs(batches)

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_fn: LossFn,
        *,
        global_valid_seqs: int,
        global_valid_toks: int,
        last: bool = True,
    ) -> TrainReport:
        """Run one optimizer step over `batches`, whose `columns` hold what `loss_fn` reads.

        `last`: false promises that another `train_step` follows before anything reads the weights, so that they may be
        gathered during its forward pass (overlap_param_gather).
        Raises NonFiniteLoss, before any weight changes, if the loss or a gradient is not finite; NonFiniteState if the
        update leaves a weight or a moment that is not.
        """
        times: list[float] = []
        outputs = self.backward(
            batches, loss_fn, global_valid_seqs=global_valid_seqs, global_valid_toks=global_valid_toks, times=times
        )
        times.append(time.time())
        metrics = combine_metrics(outputs) if outputs else {}
        if metrics and self.reads_images and self.shape.vision is not None:
            sampled = (batch.targets()[batch.next_token_counts()] for batch in batches)
            metrics["num_sampled_image_tokens"] = float(
                sum((ids == self.shape.vision.image_token).sum() for ids in sampled)
            )
        self.before_update()
        self._check_finite(batches, metrics)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()
        if self.config.deterministic:
            grad_norm = self._norm_by_sample
        free_gradients(self.optimizer)
        self.check_state(
            f"after an update with learning rate {learning_rate:.3g} and a gradient of norm {float(grad_norm):.3g}. "
            "Nothing of it is saved: go on from the newest checkpoint, with a lower learning rate or max_grad_norm",
            on_host=False,
        )
        if last and self.config.megatron_cfg.distributed_data_parallel_config.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        self._resident = self._resident or resident_bytes(self.chunks, self.optimizer)
        return TrainReport(metrics, float(grad_norm), learning_rate, (*times, time.time()))

    def backward(
        self,
        batches: Sequence[PackedBatch],
        loss_fn: LossFn,
        *,
        global_valid_seqs: int,
        global_valid_toks: int,
        times: list[float] | None = None,
    ) -> list[Any]:
        """Compute the gradient of `batches`, reduced over the ranks, and keep the log-probs as `step_logprobs`. Return
        the loss's metrics by micro-batch, on the last stage. `times`: see `_run`."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        loss = _loss_of(loss_fn, global_valid_seqs, global_valid_toks)
        self.step_logprobs = []

        def kept(batch: PackedBatch, logprobs: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
            self.step_logprobs.append(logprobs.detach())
            return loss(batch, logprobs)

        run = partial(
            self._run, compute=kept, forward_only=False, wanted=_wanted(loss_fn), loss_fn=loss_fn, times=times
        )
        with self._dropout(True):
            if not self.config.deterministic:
                return run(batches)
            outputs, self._norm_by_sample = backward_by_sample(self.chunks, batches, run, self.config.max_grad_norm)
        return outputs

    def eval_step(
        self, batches: Sequence[PackedBatch], loss_fn: LossFn, *, global_valid_seqs: int, global_valid_toks: int
    ) -> TrainReport:
        """Compute the loss of `batches` under the current weights, without training."""
        with self._evaluating():
            loss = _loss_of(loss_fn, global_valid_seqs, global_valid_toks)
            outputs = self._run(batches, loss, forward_only=True, wanted=_wanted(loss_fn), loss_fn=loss_fn)
        return TrainReport(combine_metrics(outputs) if outputs else {}, 0.0, 0.0)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            yield
        for chunk in self.chunks:
            chunk.train()

    @contextlib.contextmanager
    def _dropout(self, active: bool) -> Iterator[None]:
        """Apply the adapters' dropout. The schedule counts the steps of the RL loop, also over a resume."""
        with contextlib.ExitStack() as stack:
            if active and self.adapters is not None:
                rate = self.config.megatron_cfg.peft.dropout
                for chunk in self.chunks:
                    stack.enter_context(chunk.module.adapters.dropping(rate, self.scheduler.num_steps))
            yield

    def gather_over_data(self, values: Tensor) -> Tensor:
        """Return `values` [k, n] of all data-parallel ranks side by side; n may differ between them."""
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group()
        parts: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(parts, values.cpu(), group)
        return torch.cat(parts, dim=1)

    def advance_schedule(self) -> None:
        """Advance the learning-rate schedule by one step of the RL loop, however many optimizer steps it had."""
        self.scheduler.step(increment=1)

    def _run(
        self,
        batches: Sequence[PackedBatch],
        compute: Callable[..., Any],
        *,
        forward_only: bool,
        wanted: str = "logprobs",
        loss_fn: LossFn | None = None,
        times: list[float] | None = None,
    ) -> list[Any]:
        """Run Megatron-Core's schedule (1F1B if there are stages) over the micro-batches.

        Return the last stage's results in order. `wanted`: name of the output that the model computes, see
        `PolicyModel.score`; `compute` gets entropies or divergences (and teacher_logprobs) as columns, with their
        gradient. `times`: gets the unix time at which each forward pass begins.
        """
        padded = self._fill_schedule(batches)
        lengths = self._common_lengths(padded)

        def forward_step(iterator: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            if times is not None:
                times.append(time.time())
            batch, length = next(iterator)
            batch = batch.to(self.device)
            output = _unwrap(model).score(batch, length, wanted=wanted, loss=loss_fn)

            def finish(next_token_scores: Tensor, non_loss_data: bool = False) -> Any:
                scored = next_token_scores if wanted == "hidden" else batch.to_token_aligned(next_token_scores)
                extra = {}
                if wanted == "entropies":
                    extra = {"entropies": scored[1:]}
                elif wanted == "divergences":
                    extra = {"divergences": scored[1:2], "teacher_logprobs": scored[2:].detach()}
                first = scored if wanted == "hidden" else scored[:1]
                value, result = compute(replace(batch, columns=batch.columns | extra), first)
                return value, torch.zeros((), dtype=torch.int, device=self.device), result

            return output, finish

        iterators = [zip(padded, lengths, strict=True) for _ in self.chunks]
        results = self._forward_backward(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(padded),
            seq_length=max(batch.tokens.size(1) for batch in padded),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results[: len(batches)]

    def _fill_schedule(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """Append rows of padding, which train nothing, until the interleaved schedule's last group is full.

        That schedule runs micro-batches in groups of as many as there are pipeline stages.
        """
        missing = -len(batches) % self.layout.pipeline if self.layout.virtual > 1 else 0
        return [*batches, *[batches[0].empty_like(self.row_multiple)] * missing]

    def _common_lengths(self, batches: Sequence[PackedBatch]) -> Sequence[int | None]:
        """Return the row length of each micro-batch that all ranks pad to; None unless the dispatcher is allgather."""
        if self.shape.experts is None or not self.config.megatron_cfg.gathers_tokens:
            return [None] * len(batches)
        multiple = self.layout.tensor if self.layout.sequence_parallel else 1
        lengths = torch.tensor(
            [
                padded_length(batch.computed_cu_seqlens.diff().tolist(), self.layout.context, multiple)
                for batch in batches
            ],
            device=self.device,
        )
        torch.distributed.all_reduce(lengths, op=torch.distributed.ReduceOp.MAX)
        return lengths.tolist()

    def _check_finite(self, batches: Sequence[PackedBatch], metrics: CombinedMetrics) -> None:
        """Raise NonFiniteLoss on all ranks if loss or gradient is not finite on any of them."""
        # The engine's log-probs need not enter the loss, but if they are NaN the batch cannot be trusted.
        loss, engine_error = (cast(float, metrics.get(name, 0.0)) for name in ("loss", "token_mult_prob_error"))
        finite = math.isfinite(loss) and not math.isnan(engine_error)
        buffers = [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        finite = finite and all(is_finite(buffer.grad_data) for buffer in buffers)
        worst = torch.tensor(float(finite), device=self.device)
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MIN)
        if worst.item():
            return
        self.check_state("before this optimizer step: an earlier update, or what was loaded, was broken", moments=False)
        suspects: list[list[str] | None] = [None] * self.layout.world_size
        torch.distributed.all_gather_object(suspects, self._non_finite_samples(batches))
        names = sorted({name for names in suspects for name in names or ()})
        large: list[tuple[float, str]] = [(0.0, "")] * self.layout.world_size
        torch.distributed.all_gather_object(large, largest_weight(self.chunks))
        largest, parameter = max(large)
        if largest > LARGE:
            cause = (
                f"weight {parameter} has grown to {largest:.3g}. Lower the learning rate, and go on from a checkpoint"
            )
        elif names:
            cause = f"samples {', '.join(names[:8])}. Inspect them and the log-probs that the engine gave them"
        else:
            cause = "no single sample, but the sum of their gradients. Lower the learning rate or max_grad_norm"
        raise NonFiniteLoss(
            f"loss, gradient or the engine's log-probs are not finite; the cause: {cause}. "
            "This optimizer step changed no weight"
        )

    def check_state(self, when: str, *, moments: bool = True, on_host: bool = True) -> None:
        """Raise NonFiniteState on all ranks if a weight, or with `moments` a part of the optimizer's state, is NaN or
        infinite on any of them. `when`: ends the sentence of the message. Collective.

        `on_host`: look also at the state of an optimizer on the host. Reading it takes longer than its update. After an
        update the weights tell: a moment that is NaN makes its weight NaN. Only a second moment that overflowed, which
        makes the update 0, is left for the look before a save."""
        if self.platform.traced:
            return
        state = state_tensors(self.chunks, self.optimizer, host=on_host)
        tensors = state if moments else _parameters(self.chunks)
        worst = torch.tensor(float(all_finite(tensors)), device=self.device)
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MIN)
        if worst.item():
            return
        by_rank: list[str | None] = [None] * self.layout.world_size
        torch.distributed.all_gather_object(by_rank, first_nonfinite(self.chunks, self.optimizer))
        broken = {rank: text for rank, text in enumerate(by_rank) if text is not None}
        rank, first = next(iter(broken.items()))
        raise NonFiniteState(
            f"not finite: {first} (rank {rank}; {len(broken)} of {len(by_rank)} ranks have such values) {when}"
        )

    def _non_finite_samples(self, batches: Sequence[PackedBatch]) -> list[str]:
        """Return this rank's samples whose inputs or log-probs are not finite; only the last stage knows."""
        names = []
        for batch, logprobs in zip(batches, self.logprobs(batches) or (), strict=False):
            for column in (logprobs, *batch.columns.values()):
                bad = nonfinite_samples(column.to("cpu"), batch.loss_inputs()).tolist()
                names += [batch.names[i] for i in range(batch.num_segments) if bad[i]]
        return names

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self.adapters is not None:
            with contextlib.ExitStack() as stack:
                for chunk in self.chunks:
                    stack.enter_context(chunk.module.adapters.disabled())
                yield
            return
        if self._reference is None:
            raise RuntimeError("this policy was built without a reference (reference=False)")
        params = _parameters(self.chunks)
        self._set_aside = self._set_aside or host_copies(self.platform, params)
        self._set_aside.store(params)
        try:
            self._reference.restore(params)
            yield
        finally:
            self._set_aside.restore(params)

    def export_hf(self, folder: str | Path) -> None:
        """Write the weights, and the tokenizer and template that trained, as a folder that transformers and vLLM load.
        Raises NonFiniteState on all ranks if a weight is not finite."""
        self.check_state("when they were to be exported; nothing was written", moments=False)
        names, frozen = self.config.tokenizer, frozen_parts(self.config.megatron_cfg)
        self.weights.export_hf(
            folder,
            self.config.model_name,
            is_trained=partial(is_trained, shape=self.adapters, frozen=frozen),
            overrides=self.config.hf_config_overrides,
            tokenizer=names.name or None,
            chat_template=names.chat_template,
            template_kwargs=names.chat_template_kwargs or {},
        )

    def start_profile(self) -> None:
        """Start torch's profiler on this rank."""
        self._profile.start()

    def stop_profile(self, folder: Path) -> None:
        """End the profiler, and write its trace to `folder`/policy-RANK.json."""
        self._profile.stop(folder / f"policy-{torch.distributed.get_rank()}.json")

    def save(self, folder: str | Path) -> None:
        """Save weights, optimizer, schedule and RNG to `folder` with Megatron-Core's distributed checkpointing."""
        self.start_save(folder)
        self.is_saved(wait=True)

    def start_save(self, folder: str | Path, optimizer: bool = True) -> None:
        """Start a `save` in the background and return; training may continue. Only one may run: see `is_saved`.
        `optimizer`: write its state too. Raises NonFiniteState on all ranks, and writes nothing, if a weight or
        a moment is not finite on any."""
        from grpo_mcore.parallel.weights.checkpoint import BackgroundSave

        self.check_state("when it was to be saved; nothing was written. Go on from the newest checkpoint")
        if self._offloaded and isinstance(self._offload, OptimizerOffload):
            self._offload.leave_room()
        self._saving = self._saving or BackgroundSave()
        self._saving.start(self, Path(folder), optimizer)

    def is_saved(self, wait: bool) -> bool:
        """Whether every rank has finished writing. Raises SaveError on all ranks if one of them failed."""
        assert self._saving is not None
        return self._saving.done(wait)

    def damage(self, folder: str, digests: Mapping[str, Digest]) -> str | None:
        """Return what is wrong with the first of these files of a saved policy; None if they are what was saved."""
        return try_to_read(lambda: first_changed(Path(folder), digests))

    def load(self, folder: str | Path) -> bool:
        """Load what `save` wrote. Return whether the optimizer was in it. Raises CheckpointError if it belongs to
        another model or is incomplete."""
        from grpo_mcore.parallel.weights.checkpoint import load_checkpoint

        with_optimizer = load_checkpoint(self, Path(folder))
        self.check_state(f"in {folder}, which was loaded. Resume from an older checkpoint")
        return with_optimizer

    def offload(self) -> None:
        """Free device memory for a colocated engine: drop gradients, and move the optimizer to the host if the recipe
        does not keep it. A model that does not train moves its weights. Idempotent."""
        if self.platform.on_gpu and not self._offloaded:
            self._offloaded = True
            if self._trains:
                for chunk in self.chunks:
                    chunk.offload_grad_buffers(empty_cache=False)
                if self.config.offload_optimizer_for_generation:
                    self._offload = self._offload or OptimizerOffload(self.optimizer, self.chunks, self.platform)
            else:
                self._offload = self._offload or WeightsOffload(_parameters(self.chunks), self.platform)
            if self._offload is not None:
                self._offload.offload()
            if self.tower is not None:
                self.tower.features.clear()
            # Cached memory is no other process's: engines on this device could not wake up beside it.
            shared = self.config.generation.colocated.enabled or not self._trains
            if shared or self.config.megatron_cfg.empty_unused_memory_level > 0:
                torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo `offload`."""
        if self._offloaded:
            self._offloaded = False
            for chunk in self.chunks if self._trains else ():
                chunk.restore_grad_buffers()
            if self._offload is not None:
                self._offload.onload(self.device)

    def memory(self) -> dict[str, Any]:
        """Return the bytes of weights, gradients and optimizer during training; {} before the first step.

        On a GPU, its name, memory and peak use are included (`memory.accelerator`).
        """
        return self._resident | accelerator(self.platform) if self._resident else {}

    def rng_state(self) -> dict[str, Any]:
        return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])

    def shutdown(self) -> None:
        from grpo_mcore.parallel.layers.router_replay import clear_routers

        if self._saving is not None:
            self._saving.abort()
        clear_routers()
        leave_mesh()


def _loss_of(loss_fn: LossFn, seqs: int, toks: int) -> Callable[..., tuple[Tensor, Mapping[str, Tensor]]]:
    """Bind the global counts: `loss_fn` as a function of a micro-batch and its log-probs."""

    def loss(batch: PackedBatch, logprobs: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        return loss_fn(logprobs, batch.loss_inputs(), global_valid_seqs=seqs, global_valid_toks=toks)

    return loss


def _wanted(loss_fn: LossFn) -> str:
    """Return what the model computes for this loss, see `PolicyModel.score`."""
    if getattr(loss_fn, "divergence", None) is not None:
        return "divergences"
    return "entropies" if getattr(loss_fn, "needs_entropy", False) else "logprobs"


def _parameters(chunks: Sequence[Any]) -> list[Tensor]:
    return [parameter for chunk in chunks for parameter in chunk.parameters()]


def _unwrap(model: Any) -> Any:
    return model.module if hasattr(model, "module") else model
