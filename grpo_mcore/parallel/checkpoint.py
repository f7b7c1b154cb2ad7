"""A policy's checkpoint: weights, optimizer and schedule by Megatron-Core's distributed checkpointing, RNG by rank."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import queue
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint.api import CheckpointException

WEIGHTS = "weights and optimizer"


class CheckpointError(ValueError):
    """A checkpoint that does not belong to this policy, or is not whole."""


class SaveError(OSError):
    """A rank could not write its part: every rank raises it, with the reasons of all."""


class BackgroundSave:
    """Writes a rank's part of a checkpoint beside training, by Megatron-Core's asynchronous calls; one at a time. The
    caller makes it appear whole (DESIGN law 4).

    A forked process writes, not one that persists: for that one torch would move the tensors of a CPU rank to memory
    that both share, and training would change them under its hands. A fork has them as they were. Every method is
    collective.
    """

    def __init__(self) -> None:
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._calls = AsyncCallsQueue()
        filesystem_async._results_queue = _Result()

    def start(self, policy: Any, folder: Path) -> None:
        """Returns as soon as training may go on. Raises SaveError on all ranks where one cannot write."""
        from megatron.core import dist_checkpointing

        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        _make_moments(policy.optimizer)  # a step may have trained nothing yet
        writing = dist_checkpointing.save(_state(policy, loading=False), str(folder), async_sharded_save=True)
        with _together("RNG state"):
            torch.save(policy.rng_state(), folder / _rng_file())
        # Of these Megatron-Core lets only one rank raise.
        finish = [functools.partial(_call_together, WEIGHTS, function) for function in writing.finalize_fns]
        write = writing.async_fn and functools.partial(_undisturbed, writing.async_fn)
        with _together(WEIGHTS):
            self._calls.schedule_async_request(writing._replace(async_fn=write, finalize_fns=finish))

    def done(self, wait: bool) -> bool:
        """Whether all ranks have written all of it. Raises SaveError on all ranks where one could not."""
        self._calls.maybe_finalize_async_calls(blocking=wait)
        return not self._calls.get_num_unfinalized_calls()

    def abort(self) -> None:
        """Ends this rank's processes that write, where there are any. What they have written is no checkpoint."""
        for call in self._calls.async_calls:
            if call.async_caller.process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    writing = psutil.Process(call.async_caller.process.pid)
                    for process in [*writing.children(recursive=True), writing]:
                        process.kill()


class _Result:
    """What the process that writes tells its rank. Of a queue it has what Megatron-Core uses, which would start a
    process of its own on every rank for it, at two seconds each."""

    def __init__(self) -> None:
        self._file = open(os.memfd_create("written"), "w+b")  # a fork has the same

    def put(self, result: Any) -> None:
        pickle.dump(result, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Raises queue.Empty where nothing was put since the last time."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except EOFError:
            raise queue.Empty from None
        finally:
            self._file.seek(0)
            self._file.truncate()


def _undisturbed(write: Callable[..., None], *args: Any) -> None:
    """In the process that writes: what ends the run in order waits for it, and a terminal's Ctrl-C is not for it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    write(*args)


def _call_together(what: str, function: Callable[[], None]) -> None:
    with _together(what):
        function()


@contextlib.contextmanager
def _together(what: str) -> Iterator[None]:
    """What one rank raises inside, all ranks raise, so that none waits for it in a collective. Collective."""
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as raised:  # the latter is torch's, and no Exception
        error = raised
    reasons: list[dict[int, str]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, _reasons(error))
    if failed := {rank: reason for own in reasons for rank, reason in own.items()}:
        told = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failed.items()))
        raise SaveError(f"{what} could not be written: {told}") from error


def _reasons(error: BaseException | None) -> dict[int, str]:
    """By rank; torch lets one rank speak for all."""
    if isinstance(error, CheckpointException):
        return {rank: f"{type(raised).__name__}: {raised}" for rank, (raised, _) in error.failures.items()}
    return {} if error is None else {torch.distributed.get_rank(): f"{type(error).__name__}: {error}"}


def load_checkpoint(policy: Any, folder: Path) -> None:
    """Reads what BackgroundSave wrote. Raises CheckpointError when the model differs or a file is missing."""
    from megatron.core import dist_checkpointing

    if not (folder / "metadata.json").is_file():
        raise CheckpointError(f"{folder} is no policy checkpoint: metadata.json is missing")
    saved, here = dist_checkpointing.load_common_state_dict(str(folder))["shape"], _plain_shape(policy)
    # What an older checkpoint does not name, its model did not have: that is equal to none of it.
    if different := {
        key: (saved.get(key), here.get(key))
        for key in saved | here
        if (saved.get(key) or None) != (here.get(key) or None)
    }:
        raise CheckpointError(f"{folder} holds another model; saved and present values: {different}")
    _make_moments(policy.optimizer)
    state = dist_checkpointing.load(_state(policy, loading=True), str(folder))
    for name, chunk in _chunks(policy):
        chunk.module.load_state_dict(state[name], strict=False)
    _load_optimizer(policy.optimizer, state["optimizer"])
    policy.scheduler.load_state_dict(state["scheduler"])
    rng = folder / _rng_file()
    if rng.is_file():
        policy.set_rng_state(torch.load(rng, weights_only=False))
    else:  # another number of ranks: nothing in training draws from these generators
        warnings.warn(f"{rng} is missing; this rank keeps the RNG state of its start", stacklevel=2)


def _chunks(policy: Any) -> list[tuple[str, Any]]:
    """The model chunks by the names under which Megatron-Core looks for them."""
    chunks = policy.chunks
    return [("model", chunks[0])] if len(chunks) == 1 else [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _make_moments(optimizer: Any) -> None:
    """Gives a fresh optimizer the state tensors that are loaded into: torch's Adam makes them at its first step."""
    for distributed in optimizer.chained_optimizers:
        adam = distributed.optimizer
        for param in (param for group in adam.param_groups for param in group["params"]):
            if not adam.state[param]:
                adam.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }


def _load_optimizer(optimizer: Any, state: dict[Any, Any]) -> None:
    """Loads in two parts because of torch's Adam, which Megatron-Core uses where TransformerEngine is missing.

    Megatron-Core 0.16 gives all parameters one shared `step` tensor, which Adam would then count up once for each of
    them, and trips over `step` when it copies the moments. So `step` is taken out, and put back one by one.
    """
    for index, distributed in enumerate(optimizer.chained_optimizers):
        part = state[index]
        moments = part.pop("param_state")
        distributed.load_state_dict(part)
        by_param = distributed.optimizer.state.values()
        steps = [values.pop("step", None) for values in by_param]
        distributed.load_parameter_state_from_fully_reshardable(moments)
        for values, step in zip(by_param, steps, strict=True):
            if step is not None:
                values["step"] = step.clone()


def _state(policy: Any, *, loading: bool) -> dict[str, Any]:
    models = {name: chunk.module.sharded_state_dict() for name, chunk in _chunks(policy)}
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}  # loads on another layout too
    sharded = models["model"] if len(models) == 1 else models
    # One part, or two with experts, whose state is split over other ranks. A stage may have no experts.
    parts = enumerate(policy.optimizer.chained_optimizers)
    with _buckets_in_place(policy.optimizer):
        optimizer = {i: part.sharded_state_dict(sharded, is_loading=loading, metadata=metadata) for i, part in parts}
    return {
        **models,
        "optimizer": optimizer,
        "scheduler": policy.scheduler.state_dict(),
        "shape": _plain_shape(policy),
    }


def _plain_shape(policy: Any) -> dict[str, Any]:
    """The model's sizes as plain values: the checkpoint's settings are read without executing anything."""
    adapters = {"adapters": asdict(policy.adapters)} if policy.adapters else {}
    return json.loads(json.dumps(asdict(policy.shape) | adapters, default=lambda member: member.value))


@contextlib.contextmanager
def _buckets_in_place(optimizer: Any) -> Iterator[None]:
    """Puts right where Megatron-Core 0.16 looks for a parameter's state.

    It gathers a buffer's buckets without the padding at their ends, but then cuts parameters out by their places in the
    padded buffer. With more than one bucket, which tied embeddings on two stages make, it would save shifted values.
    """
    parts = optimizer.chained_optimizers
    for part in parts:
        part.get_parameter_state_dp_zero = functools.partial(_padded_state, part, part.get_parameter_state_dp_zero)
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero  # the class's own is there again


def _padded_state(part: Any, gather: Any, **kwargs: Any) -> Any:
    state = gather(**kwargs)
    for index, buffer in enumerate(part.buffers) if state is not None else ():
        (tensors,) = state[index].values()
        for key in ("param", "exp_avg", "exp_avg_sq"):
            whole = tensors[key].new_zeros(buffer.numel)
            sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
            for bucket, values in zip(buffer.buckets, tensors[key].split(sizes), strict=True):
                whole[bucket.offset : bucket.offset + len(values)] = values
            tensors[key] = whole
    return state


def _rng_file() -> str:
    return f"rng-{torch.distributed.get_rank():05d}-of-{torch.distributed.get_world_size():05d}.pt"
