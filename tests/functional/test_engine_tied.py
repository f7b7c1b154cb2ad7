"""Engines that start without weights, on a model with tied embeddings."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mcore.families import params_of
from grpo_mcore.generation import Engine, EngineError
from tests.functional.engine_cases import (
    Policy,
    check_refit_in_flight,
    config,
    generate,
    make_model,
    request,
    worst_difference,
)
from tests.functional.rank_server import ranks
from tests.functional.runs import shared_files


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_tied_embeddings_into_an_engine_that_was_never_filled(tmp_path: Path, tensor_parallel_size: int) -> None:
    """With two ranks, each is a process of its own, which finds the backend by the package's entry point."""
    make_model(tmp_path, tie_word_embeddings=True)
    before, mapped = ranks(), shared_files([os.getpid()])
    engine = Engine(config(tmp_path, load_format="dummy", tensor_parallel_size=tensor_parallel_size))
    policy = Policy(tmp_path)
    queues = {path for path in shared_files([os.getpid()]) - mapped if path.name.startswith("psm_")}
    try:
        assert not queues, "they have no names by now: nobody removes them after a killed process"
        assert "lm_head.weight" not in policy.plan(engine).to_json()
        with pytest.raises(EngineError, match="weights of no version"):
            generate(engine, [request(1)])
        assert engine.health()["state"] == "unfilled"
        for version in (1, 2):
            # An error of every rank first: the next answers must be those to the next calls.
            policy.refit_wrongly(engine)
            policy.change(seed=version)
            policy.refit(engine, version)
            found = generate(engine, [request(number) for number in range(8)])
            assert worst_difference(policy.reference, found) < 1e-4
            assert {t.weight_version for t in found.values()} == {version}
        check_refit_in_flight(engine, policy, 10)
        # The embedding through vLLM's own loading: the tied head computes with a packed copy of it.
        params = [replace(p, engine=None) if "word_embeddings" in p.megatron else p for p in params_of(policy.shape)]
        policy.change(seed=3)
        report = policy.refit(engine, 20, policy.plan(engine, params=params))
        assert report.fallbacks == ("model.embed_tokens.weight",)
        assert worst_difference(policy.reference, generate(engine, [request(1)])) < 1e-4
    finally:
        policy.close()
        engine.shutdown()
    assert ranks() == before
    assert not list(Path("/dev/shm").glob(f"*{policy.run_id}*"))
