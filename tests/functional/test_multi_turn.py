"""Several turns on a real vLLM engine: tokens are kept exactly, log-probs are those of the whole conversation, and a
run trains on them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from examples.sliding_puzzle.make_model import make_puzzle_model
from grpo_mcore.cluster import LocalCluster
from grpo_mcore.data import load_tokenizer
from grpo_mcore.driver.engines.engine_group import EngineGroup, EngineSlot, EngineWorker
from grpo_mcore.driver.rollouts.rollouts import Rollouts
from grpo_mcore.driver.rollouts.scoring import as_workers
from grpo_mcore.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from grpo_mcore.generation import EngineConfig
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.life import TurnLimits
from grpo_mcore.rollout.trajectory import GenerationRequest, Sampling, Trajectory, Turn
from tests.functional import engine_cases
from tests.functional.engine_cases import Policy, load_reference
from tests.functional.recorded_runs import looking_inside
from tests.functional.runs import Run, finished

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CONTEXT, TURNS = 512, 4
STOPS = (("a", "e", "o"), ("u", "1", "2"), ("</action>", "up", "down", "left"))  # by turn


class Talk(EnvironmentInterface):
    """Continues until turn TURNS, with other stop strings in every turn."""

    def step(self, message_log_batch: Sequence[Sequence[Any]], metadata: Sequence[dict[str, Any]]) -> EnvironmentReturn:
        turns = [sum(message["generated"] for message in messages) for messages in message_log_batch]
        count = len(turns)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"turn {turn}: go on"} for turn in turns],
            metadata=[None] * count,
            next_stop_strings=[list(STOPS[turn % len(STOPS)]) for turn in turns],
            rewards=[1.0] * count,
            terminateds=[turn == TURNS for turn in turns],
            answers=[None] * count,
            reasons=[""] * count,
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("puzzle-model")
    make_puzzle_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def engines(folder: Path, cluster: LocalCluster) -> EngineGroup:
    config = EngineConfig(str(folder), dtype="float32", max_model_len=CONTEXT, kv_cache_memory_gb=0.1)
    engine = cluster.spawn("engine-0", EngineWorker, config, cluster.store)
    return EngineGroup(cluster, [EngineSlot(engine)], sleeps=False)


def play(engines: EngineGroup, tokenizer: Any, *, prompts: int, turns: int = TURNS) -> list[Group]:
    """Return groups of 4 samples, in order of their prompts. The prompts are long and distinct: one call has more
    tokens than vLLM prefills at a time."""
    rollouts = Rollouts(
        engines, as_workers({"talk": Talk()}, engines.cluster), tokenizer, TurnLimits(turns, CONTEXT), seed=3
    )
    data = []
    for number in range(prompts):
        tokens = torch.randint(7, 60, (150,), generator=torch.Generator().manual_seed(number))
        message = {"role": "user", "content": "?", "token_ids": tokens}
        data.append(
            {"uid": f"p{number:02d}", "task_name": "talk", "length": 150, "extra_env_info": {}}
            | {"message_log": [message], "stop_strings": list(STOPS[0])}
        )
    sampling = Sampling(max_new_tokens=60, stop_token_ids=(tokenizer.eos_token_id,))
    rollouts.dispatch(data, sampling, generations=4, step=1)
    return sorted((rollouts.next_group() for _ in data), key=lambda group: group.uid)


@pytest.fixture(scope="module")
def groups(engines: EngineGroup, tokenizer: Any) -> list[Group]:
    return play(engines, tokenizer, prompts=32)


def samples(groups: Sequence[Group]) -> list[Any]:
    return [sample for group in groups for sample in group.samples]


def test_turns_follow_each_other_token_by_token(groups: list[Group], tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    ends = {"token": 0, "string": 0, "limit": 0}
    for sample in samples(groups):
        trajectory: Trajectory = sample.ref
        prompt, *others = trajectory.turns
        generated, between = others[::2], others[1::2]
        assert len(prompt) == 150 and sample.turns == len(generated) == len(between) + 1
        for number, turn in enumerate(generated):
            assert turn.loss_mask and turn.role == "assistant" and len(turn) <= 60
            # The text ends with the stop string, even within a token; the tokens stay as they were sampled.
            assert tokenizer.decode(turn.token_ids, skip_special_tokens=True).startswith(turn.text)
            by_token, by_string = turn.token_ids[-1] == eos, turn.text.endswith(STOPS[number % len(STOPS)])
            ends["token" if by_token else "string" if by_string else "limit"] += 1
            if number < len(between):
                said = f"<user>turn {number + 1}: go on<assistant>"
                tokens = ([] if by_token else [eos]) + tokenizer(said, add_special_tokens=False)["input_ids"]
                assert between[number].token_ids.tolist() == tokens
                assert not between[number].loss_mask and between[number].logprobs is None
                assert by_token or by_string  # a turn that was cut off is the last
        last = generated[-1]
        assert sample.truncated == (len(last) == 60 and last.token_ids[-1] != eos and not last.text.endswith(STOPS[0]))
        assert sample.turns == TURNS or sample.truncated
        assert trajectory.weight_versions == ((0, 0, trajectory.length),)
    assert ends["token"] > 20 and ends["string"] > 200, ends
    assert any(sample.turns < TURNS for sample in samples(groups)) or ends["limit"] == 0


def test_columns_cover_what_was_generated_and_nothing_else(groups: list[Group]) -> None:
    for sample in samples(groups):
        trajectory = sample.ref
        tokens = torch.cat([turn.token_ids for turn in trajectory.turns])
        mask = torch.cat([torch.full((len(turn),), turn.role == "assistant") for turn in trajectory.turns])
        assert torch.equal(trajectory.token_ids(), tokens) and torch.equal(trajectory.loss_mask(), mask)
        assert (trajectory.logprobs()[mask] < 0).all() and not trajectory.logprobs()[~mask].any()
        assert (sample.length, sample.generated_length) == (len(tokens), int(mask.sum()))
        assert sample.prompt_length + sample.environment_tokens == int((~mask).sum())


@torch.no_grad()
def test_log_probs_are_those_of_the_whole_conversation(groups: list[Group], folder: Path) -> None:
    """Compare with transformers in one pass over all turns. The engine saw them turn by turn, mostly from its cache."""
    reference, worst = load_reference(folder), 0.0
    for sample in samples(groups):
        tokens, mask = sample.ref.token_ids(), sample.ref.loss_mask()
        logprobs = reference(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        worst = max(worst, (logprobs - sample.ref.logprobs()[1:])[mask[1:]].abs().max().item())
    assert worst < 1e-5


def test_the_first_turn_is_that_of_a_rollout_of_one_turn(
    groups: list[Group], engines: EngineGroup, tokenizer: Any
) -> None:
    """A repeated rollout also draws the same tokens, whatever else is in the engine's batch."""
    once = play(engines, tokenizer, prompts=3, turns=1)
    again = play(engines, tokenizer, prompts=3)
    for mine, one, same in zip(samples(groups[:3]), samples(once), samples(again), strict=True):
        assert one.turns == 1
        assert torch.equal(one.ref.token_ids(), mine.ref.token_ids()[: one.length])
        assert torch.equal(same.ref.token_ids(), mine.ref.token_ids())


def test_versions_of_a_trajectory_that_outlives_a_refit(tmp_path: Path) -> None:
    """The environment's tokens count towards the weights that read them."""
    folder = engine_cases.make_model(tmp_path)
    policy = Policy(folder)
    with LocalCluster() as cluster:
        worker = cluster.spawn("engine-0", EngineWorker, engine_cases.config(folder), cluster.store)
        request = engine_cases.request(1, length=10)
        sampling = Sampling(max_new_tokens=5)
        trajectory = next(worker.target.generate_refs([request], sampling))[0].content
        for version, length in ((0, 20), (1, 30), (1, 40)):
            if version != worker.target.weight_version:
                policy.change(version)
                policy.refit(worker.target, version)
            said = Turn("user", torch.arange(5) + 2)
            request = GenerationRequest(trajectory.uid, 0, (said,), 7, continues=trajectory)
            before, trajectory = trajectory, next(worker.target.generate_refs([request], sampling))[0].content
            assert trajectory.turns[:-2] == before.turns and trajectory.length == length + 5
        assert trajectory.weight_versions == ((0, 0, 25), (1, 25, 45))
        assert trajectory.weight_version == 0
        with pytest.raises(ValueError, match="160 prompt tokens in a context of 160"):
            request = GenerationRequest("p", 0, (Turn("user", torch.arange(115) + 2),), 7, continues=trajectory)
            next(worker.target.generate_refs([request], sampling))
    policy.close()


# Smaller versions of the recipes of the sliding puzzle.


def recipe(name: str, **policy: Any) -> dict[str, Any]:
    found = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    return found | {"policy": found["policy"] | policy}


@pytest.fixture(scope="module")
def base(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that makes moves, some of them good ones."""
    words = ["sft.max_num_steps=60", "policy.megatron_cfg.scheduler.lr_decay_iters=60"]
    words += ["data.train.dataset_kwargs.right_share=1.0", "data.train.dataset_kwargs.num_puzzles=500"]
    sft = recipe("sft-sliding-puzzle-cpu", model_name=str(folder))
    run = finished("sft", tmp_path_factory.mktemp("sft-puzzle"), sft, *words)
    return run.checkpoints / "hf"


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Any]:
    words = ["grpo.max_num_steps=2", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=8"]
    words += ["policy.train_global_batch_size=32", "grpo.max_val_samples=10", "grpo.val_at_start=false"]
    words += ["policy.generation.vllm_cfg.kv_cache_memory_gb=0.1", "checkpointing.enabled=false"]
    words += ["policy.megatron_cfg.optimizer.lr=1.0e-4"]
    grpo = recipe("grpo-sliding-puzzle-cpu", model_name=str(base))
    with looking_inside() as inside:
        run = finished("train", tmp_path_factory.mktemp("grpo-puzzle"), grpo, *words)
    return run, inside


def test_a_run_learns_from_games(trained: tuple[Run, Any]) -> None:
    run, inside = trained
    first, second = run.metrics()
    for line in (first, second):
        assert 0 < line["reward"] < 1 and line["num_failed_samples"] == 0
        assert line["num_trained_samples"] == 64 and line["grad_norm"] > 0
        assert line["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert line["prompt_length"] == 10
    assert len(inside.optimizer_steps) == 4
    (validation,) = run.metrics("validation")
    assert validation["num_samples"] == 10


def test_a_game_is_shown_with_both_sides(trained: tuple[Run, Any]) -> None:
    run, _ = trained
    shown = run.out[run.out.index("validation sample 1 of 1") :]
    assert "prompt  <bos><user>" in shown and "<assistant><action>" in shown and "</action><eos><user>" in shown
