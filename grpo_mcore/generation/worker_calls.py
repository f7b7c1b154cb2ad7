"""What an engine runs on each of its tensor-parallel ranks."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any


def refit_step(worker: Any, step: str, argument: Any = None) -> dict[str, Any]:
    """One step of a weight update through vLLM's worker. Returns the weight-transfer backend's report.

    An error comes back as text under "error": raised, it would leave the other ranks' answers unread in
    vLLM's queue, and every answer after them would belong to the call before.
    """
    backend = worker.weight_transfer_engine
    try:
        match step:
            case "start":
                worker.init_weight_transfer_engine(argument)
                worker.start_weight_update()
            case "load":
                worker.update_weights(argument)
            case "wait":
                pass  # the report tells whether the bucket is still being taken
            case "finish":
                worker.finish_weight_update()
            case "release":
                backend.release()
            case "abort":
                in_session = backend.in_session
                backend.abort()
                if in_session:
                    worker.finish_weight_update()  # ends vLLM's session; nothing is left to apply
            case _:
                raise ValueError(f"no refit step {step!r}")
        return backend.report()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def unlink_shared_segments(worker: Any) -> None:
    """Remove the names of the segments in which vLLM's CPU ranks exchange data, which vLLM itself never does.

    Every rank has mapped them when the model is loaded; the memory goes with the last rank.
    """
    if worker.rank == 0:
        for segment in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*-cpushm_*"):
            segment.unlink()
