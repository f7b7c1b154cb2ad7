"""A policy's checkpoint: weights, optimizer and schedule by Megatron-Core's distributed checkpointing, RNG by rank."""

import contextlib
import functools
import json
import os
import pickle
import queue
import signal
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint.api import CheckpointException

from grpo_mcore.base import tensor_files
from grpo_mcore.base.files import PART, leave_digests
from grpo_mcore.parallel.memory import on_device, on_host

WEIGHTS = "weights and optimizer"
MASTER = "master_param"
"""Name of a float32 weight in an optimizer's state, where the optimizer keeps it."""
STATE = ("param", "exp_avg", "exp_avg_sq")
"""Megatron-Core's names of what an optimizer keeps of a weight."""
GATHERED = 2**26
"""Maximum number of elements that a save gathers on a rank's device at a time: 256 MiB. Engines may be awake there."""


class CheckpointError(ValueError):
    """A checkpoint belongs to another model or is incomplete."""


class SaveError(OSError):
    """At least one rank could not write its part. Every rank raises it, with all ranks' reasons."""


class BackgroundSave:
    """Writes this rank's part of a checkpoint during training, by Megatron-Core's asynchronous calls; one at a time.

    The caller makes the checkpoint appear whole. A forked process writes, not a persistent one: torch
    would share a CPU rank's tensors with a persistent process, and training would change them while they are written.
    A fork keeps them as they were. Every method is collective.
    """

    def __init__(self) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._calls = AsyncCallsQueue()
        self._undigested: Path | None = None  # folder of which the digests are not complete
        self._results = _ResultFile()

    def start(self, policy: Any, folder: Path, optimizer: bool) -> None:
        """Start writing; training may continue on return. `optimizer`: write its state too. Raises SaveError on all
        ranks if one cannot write."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async._results_queue = self._results  # of this save: a critic's may be under way too
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        state = _state(policy)
        if optimizer:
            make_moments(policy.optimizer)  # there are none before the first optimizer step
            in_parts = not policy.config.megatron_cfg.dist_ckpt_optim_fully_reshardable
            state |= _optimizer_state(policy, state, loading=False, in_parts=in_parts)
        writing = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
        with _raise_on_all_ranks("RNG state"):
            tensor_files.save(policy.rng_state(), folder / _rng_file())
        # Without this, an error in these functions would be raised on one rank only.
        finish = [_raise_on_all_ranks(WEIGHTS)(function) for function in writing.finalize_fns]
        write = writing.async_fn and functools.partial(_write_ignoring_signals, writing.async_fn, folder)
        self._undigested = folder
        with _raise_on_all_ranks(WEIGHTS):
            self._calls.schedule_async_request(writing._replace(async_fn=write, finalize_fns=finish))

    def done(self, wait: bool) -> bool:
        """Whether all ranks have finished writing. Raises SaveError on all ranks if one of them failed."""
        self._calls.maybe_finalize_async_calls(blocking=wait)
        if self._calls.get_num_unfinalized_calls():
            return False
        if self._undigested is not None:
            with _raise_on_all_ranks("digests"):
                if torch.distributed.get_rank() == 0:  # of the small files that are not one rank's part
                    leave_digests(self._undigested, "common", _without_part(self._undigested))
            self._undigested = None
        return True

    def abort(self) -> None:
        """Kill this rank's writing processes, if any. What they have written is not a checkpoint."""
        for call in self._calls.async_calls:
            if call.async_caller.process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    writer = psutil.Process(call.async_caller.process.pid)
                    for process in [*writer.children(recursive=True), writer]:
                        process.kill()


class _ResultFile:
    """A file through which the writing process reports to its rank, with the queue methods that Megatron-Core calls.

    Megatron-Core's own queue would start a manager process on every rank, which takes two seconds.
    """

    def __init__(self) -> None:
        self._file = open(os.memfd_create("written"), "w+b")  # shared with the forked process

    def put(self, result: Any) -> None:
        pickle.dump(result, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Return what was put since the last call. Raises queue.Empty if nothing was."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except EOFError:
            raise queue.Empty from None
        finally:
            self._file.seek(0)
            self._file.truncate()


def _write_ignoring_signals(write: Callable[..., None], folder: Path, *args: Any) -> None:
    """Run `write` in the writing process, and leave the digests of what it has written: an orderly end of the run waits
    for it, and Ctrl-C must not stop it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    write(*args)
    rank = torch.distributed.get_rank()
    leave_digests(folder, f"{rank:05d}", [path.name for path in folder.glob(f"__{rank}_*")])


def _without_part(folder: Path) -> list[str]:
    """Return the names of the files that are not the part of one rank."""
    files = (path for path in folder.iterdir() if path.is_file())  # a critic's folder is inside the policy's
    return [path.name for path in files if not (path.name.startswith("__") or path.match(PART))]


@contextlib.contextmanager
def _raise_on_all_ranks(action: str) -> Iterator[None]:
    """Raise SaveError on all ranks if the body fails on one, so that none waits for it in a collective. Collective."""
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as raised:  # torch's CheckpointException is a BaseException
        error = raised
    reasons: list[dict[int, str]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, _reasons(error))
    if failed := {rank: reason for of_rank in reasons for rank, reason in of_rank.items()}:
        details = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failed.items()))
        raise SaveError(f"{action} could not be written: {details}") from error


def _reasons(error: BaseException | None) -> dict[int, str]:
    """Return the error as text, by rank; torch's CheckpointException carries those of several ranks."""
    if isinstance(error, CheckpointException):
        return {rank: f"{type(raised).__name__}: {raised}" for rank, (raised, _) in error.failures.items()}
    return {} if error is None else {torch.distributed.get_rank(): f"{type(error).__name__}: {error}"}


def load_checkpoint(policy: Any, folder: Path) -> bool:
    """Load what BackgroundSave wrote. Return whether it holds the optimizer; without it, Adam starts from the weights
    that the model computes with. Raises CheckpointError if the model differs or a file is missing."""
    from megatron.core import dist_checkpointing

    if not (folder / "metadata.json").is_file():
        raise CheckpointError(f"{folder} is not a policy checkpoint: metadata.json is missing")
    common = dist_checkpointing.load_common_state_dict(str(folder))
    # A key that an older checkpoint lacks names a feature that its model did not have: it has the default, or is empty.
    saved = {field.name: field.default for field in fields(policy.shape) if field.default is not MISSING}
    saved, current = saved | common["shape"], _plain_shape(policy)
    if different := {
        key: (saved.get(key), current.get(key))
        for key in (saved | current).keys() - {"carried", "vision"}  # what exports copy beside the weights
        if (saved.get(key) or None) != (current.get(key) or None)
    }:
        raise CheckpointError(f"{folder} holds another model; (saved, present) values: {different}")
    parts = common.get("optimizer_parts")
    if parts is not None and parts != (present := policy.layout.optimizer_parts()):
        raise CheckpointError(
            f"{folder} holds the optimizer in the parts of another layout: {parts}, here {present}. Resume it on its "
            "own layout; only the data- and context-parallel sizes may differ. Checkpoints that are written with "
            "policy.megatron_cfg.dist_ckpt_optim_fully_reshardable: true load on every layout"
        )
    state = _state(policy)
    if with_optimizer := "optimizer" in common:
        make_moments(policy.optimizer)
        state |= _optimizer_state(policy, state, loading=True, in_parts=parts is not None)
    state = dist_checkpointing.load(state, str(folder))
    for name, chunk in _chunks(policy):
        chunk.module.load_state_dict(state[name], strict=False)
    if with_optimizer:
        _load_optimizer(policy.optimizer, state["optimizer"], in_parts=parts is not None)
    else:
        _reload_weights(policy.optimizer)
    policy.scheduler.load_state_dict(state["scheduler"])
    rng = folder / _rng_file()
    if rng.is_file():  # not where another number of ranks saved it; training draws nothing from these generators
        policy.set_rng_state(tensor_files.load(rng))
    return with_optimizer


def _chunks(policy: Any) -> list[tuple[str, Any]]:
    """Return the model chunks with the names that Megatron-Core expects."""
    chunks = policy.chunks
    return [("model", chunks[0])] if len(chunks) == 1 else [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def make_moments(optimizer: Any) -> None:
    """Create the state tensors to load into, which Adam would create in its first step.

    torch's Adam counts steps per parameter. TransformerEngine's counts them per group, and its `state_dict` fails on
    names other than the moments and, if it keeps them, the float32 weights.
    """
    for adam in (*on_device(optimizer), *on_host(optimizer)):
        for group in adam.param_groups:
            for param in group["params"]:
                if not adam.state[param]:
                    moments = (torch.zeros_like(param, dtype=torch.float32) for _ in range(2))
                    adam.state[param] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
                    if getattr(adam, "master_weights", False):
                        adam.state[param][MASTER] = param.detach().float()
                    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
                        device = param.device if group["fused"] else "cpu"
                        adam.state[param]["step"] = torch.zeros((), dtype=torch.float32, device=device)
    for part in optimizer.chained_optimizers:
        if on_host(part):
            part.optimizer._sync_sub_optimizers_state_to_hdo()


def _parts(optimizer: Any) -> list[tuple[int, Any]]:
    """Return the optimizers of this stage that have parameters, with their index: one, or two if it has experts, whose
    state is split over other ranks."""
    return [(index, part) for index, part in enumerate(optimizer.chained_optimizers) if part.buffers]


def _load_optimizer(optimizer: Any, state: dict[Any, Any], *, in_parts: bool) -> None:
    """Copy what was saved into the tensors of `make_moments`. The settings stay: the recipe's learning rates, betas and
    so on may have changed since.

    Megatron-Core 0.16's own `load_state_dict` gives all parameters one shared `step` tensor, which torch's Adam would
    increment once per parameter, and builds all copies of an optimizer on the host anew.
    """
    # Rank 0 has saved the settings, which are none of experts if the first stage has no layer with experts.
    settings = [saved["optimizer"]["param_groups"] for saved in state.values() if "optimizer" in saved]
    step = max((group.get("step") or 0 for groups in settings for group in groups), default=0)
    for index, part in _parts(optimizer):
        saved = state[index]
        for adam in (*on_device(part), *on_host(part)):
            if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
                for values in adam.state.values():
                    values["step"].fill_(step)
            else:
                for group in adam.param_groups:
                    group["step"] = int(step)
        name = "dp_reshardable" if in_parts else "fully_reshardable"
        with (
            torch.no_grad(),
            _replaced(part, _set_main_param_and_optimizer_states=functools.partial(_copy_state, part)),
            # Nothing to do after the copying, and it would leave the device's state on the host.
            _replaced(part.optimizer, _sync_hdo_state_to_sub_optimizers=lambda: None),
        ):
            getattr(part, f"load_parameter_state_from_{name}")(saved["param_state"])


def _copy_state(part: Any, weight: Any, saved: dict[str, Any]) -> None:
    """Copy the saved state of this rank's part of a weight."""
    group, index = part.model_param_group_index_map[weight]
    param = part.optimizer.param_groups[group]["params"][index]
    moments = part.optimizer.state[param]
    moments.get(MASTER, param).copy_(saved["param"])
    for name in ("exp_avg", "exp_avg_sq"):
        moments[name].copy_(saved[name])


@torch.no_grad()
def _reload_weights(optimizer: Any) -> None:
    """Let the optimizer's float32 weights be those that the model computes with."""
    optimizer.reload_model_params()
    for part in optimizer.chained_optimizers:
        for param, values in part.optimizer.state.items():
            if MASTER in values:
                values[MASTER].copy_(param)


def _state(policy: Any) -> dict[str, Any]:
    """Return what a checkpoint holds besides the optimizer."""
    return {
        **{name: _weights(chunk.module) for name, chunk in _chunks(policy)},
        "scheduler": policy.scheduler.state_dict(),
        "shape": _plain_shape(policy),
    }


def _weights(network: Any) -> dict[str, Any]:
    """Return the network's sharded tensors without the FP8 state that each layer of TransformerEngine adds. It is empty
    in bfloat16, and a checkpoint without it loads with and without TransformerEngine."""
    return {key: value for key, value in network.sharded_state_dict().items() if not key.endswith("._extra_state")}


def _optimizer_state(policy: Any, state: dict[str, Any], *, loading: bool, in_parts: bool) -> dict[str, Any]:
    """Return the optimizer's part of a checkpoint. `state`: from `_state`. `in_parts`: each rank's own part of the
    optimizer as it is, or whole parameters, which every rank gathers and which load on any layout."""
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    models = {name: state[name] for name, _ in _chunks(policy)}
    metadata = {"distrib_optim_sharding_type": "dp_reshardable" if in_parts else "fully_reshardable"}
    sharded = models["model"] if len(models) == 1 else models
    optimizer = {}
    for index, part in _parts(policy.optimizer):
        with _replaced(
            part,
            get_parameter_state_dp_zero=functools.partial(_whole_state, part),
            state_dict=functools.partial(_plain_state, part.state_dict),
            load_state_dict=lambda state: None,  # it would create what `make_moments` has
        ):
            optimizer[index] = part.sharded_state_dict(sharded, is_loading=loading, metadata=metadata)
            if in_parts:  # the names of parts do not tell the two apart
                add_prefix_for_sharding(optimizer[index], f"chained_{index}.")
    return {"optimizer": optimizer, "optimizer_parts": policy.layout.optimizer_parts() if in_parts else None}


def _plain_shape(policy: Any) -> dict[str, Any]:
    """Return the model's sizes as plain values, so that reading them from a checkpoint executes no code."""
    adapters = {"adapters": asdict(policy.adapters)} if policy.adapters else {}
    return json.loads(json.dumps(asdict(policy.shape) | adapters, default=lambda member: member.value))


@contextlib.contextmanager
def _replaced(instance: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of one object."""
    vars(instance).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(instance)[name]  # restores the class's method


def _plain_state(state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's settings without classes, which those of an optimizer on the host have: a checkpoint holds
    plain values."""
    state = state_dict()
    groups = state["optimizer"]["param_groups"]
    plain = [{key: value for key, value in group.items() if not isinstance(value, type)} for group in groups]
    return state | {"optimizer": state["optimizer"] | {"param_groups": plain}}


def _whole_state(part: Any, *, empty_data: bool, **_: Any) -> dict[Any, Any]:
    """Return the optimizer's state of this rank's parameters, float32 on the host, by position in the padded buffers.
    Collective over the data-parallel ranks, unless `empty_data`.

    Megatron-Core 0.16's own function gathers a whole bucket on the device at a time, two copies of it under NCCL; the
    later stages of a pipeline have all their weights in one. It also leaves the padding between buckets out and then
    cuts parameters out by their positions in the padded buffer: it would save shifted values.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, (buffer, by_dtype) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        ((dtype, ranges),) = by_dtype.items()
        whole = {key: torch.zeros(buffer.numel, dtype=torch.float32, device="cpu") for key in STATE}
        for bucket, ranges_of_rank in () if empty_data else zip(buffer.buckets, ranges, strict=True):
            ranks = part.data_parallel_group.size()
            rows = {
                key: values[bucket.offset :][: bucket.grad_data.numel()].view(ranks, -1)
                for key, values in whole.items()
            }
            here = {key: torch.zeros(places.size(1), dtype=torch.float32, device="cpu") for key, places in rows.items()}
            for weight, there in ranges_of_rank["param_map"].items():
                at, tensors = there["gbuf_local"], part._get_main_param_and_optimizer_states(weight)
                for key, values in here.items():
                    values[at.start : at.end].copy_(tensors[key].detach())
            for key, values in here.items():
                _gather(values, rows[key], part.data_parallel_group, bucket.grad_data.device)
        state[index] = {dtype: whole}
    return state


def _gather(local: torch.Tensor, rows: torch.Tensor, group: Any, device: torch.device) -> None:
    """Fill `rows` [ranks, n] with `local` [n] of each rank, all on the host, by way of the device."""
    ranks = group.size()
    if ranks == 1:
        rows[0].copy_(local)
        return
    piece = max(1, GATHERED // ranks)
    for sent, places in zip(local.split(piece), rows.split(piece, dim=1), strict=True):
        received = torch.empty(places.numel(), dtype=local.dtype, device=device)
        torch.distributed.all_gather_into_tensor(received, sent.to(device), group)
        places.copy_(received.view(places.shape))


def _rng_file() -> str:
    return f"rng-{torch.distributed.get_rank():05d}-of-{torch.distributed.get_world_size():05d}.pt"
