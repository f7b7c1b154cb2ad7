"""GRPO on samples that agents of a NeMo Gym play: its servers call the policy's endpoint over HTTP."""

import json
import os
import socket
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from openai_harmony import HarmonyEncodingName, load_harmony_encoding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from examples.sliding_puzzle.make_model import make_puzzle_model
from grpo_mcore.base.processes import free_port
from grpo_mcore.cli.main import main
from grpo_mcore.data import load_tokenizer
from grpo_mcore.generation.chat.answer import AnswerReader
from grpo_mcore.generation.chat.request import ChatRequest
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.observe import audit, read_ledger
from grpo_mcore.rollout.group import Group
from grpo_mcore.rollout.trajectory import Sampling, Trajectory, Turn
from grpo_mcore.tools.demo.arithmetic import make_tokenizer
from tests.functional.recorded_runs import recording_groups
from tests.functional.runs import Run, agents_recipe, finished, write_recipe
from tests.gym_server import AGENT, GymServer

TOKEN, VARIABLE = "a-token-of-the-tests", "GYM_TEST_POLICY_KEY"
FAILS = {
    "5xx": "answers 500: the sandbox is gone",
    "4xx": "answers 422: no such tool set",
    "no json": "answers with no JSON: b'<html>'",
    "failure": "the Gym says 'judge_failed'",
    "final failure": "the Gym says 'timeout_exceeded'",
    "mask": "the Gym says that it must not be trained on (mask_sample)",
    "nan reward": "the Gym's reward is nan",
    "no tokens": "no item of the output has generation_token_ids",
    "other tokens": "has not generated these tokens (turn 1)",
    "nan log-prob": "a log-prob is nan",
}
ATTEMPTS = {"5xx": 3, "5xx once": 2, "killed once": 2, "failure": 3, "no json": 3}
PLAYED = [
    {"turns": 3},
    {"turns": 3, "said_by": "tool"},
    {"turns": 40, "question": "go on and on"},
    {"turns": 4, "behave": "forgets"},
    {"turns": 3, "behave": "rewrites"},
    {"turns": 2, "behave": "5xx once"},
    {"turns": 1, "behave": "killed once"},
]


@dataclass
class Played:
    """A run, its Gym and the groups that came back."""

    run: Run
    gym: GymServer
    groups: dict[str, Group] = field(default_factory=dict)


def tasks() -> list[dict[str, Any]]:
    rows = [*PLAYED, *({"behave": name, "rollout": 1, "turns": 2} for name in FAILS)]
    return [
        {
            "responses_create_params": {"input": [{"role": "user", "content": row.pop("question", f"task {n}")}]},
            "agent_ref": {"type": "responses_api_agents", "name": AGENT},
            "expected_answer": str(n),
            **row,
        }
        for n, row in enumerate(json.loads(json.dumps(rows)))
    ]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gym") / "data0"
    make_puzzle_model(folder)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks()))
    data = {"dataset_name": "NemoGymDataset", "data_path": str(folder / "tasks.jsonl")}
    env = {"should_use_nemo_gym": True, "nemo_gym": {"rollout_timeout_s": 200.0}}
    server = {"http_server_port": free_port(), "http_server_api_key_env_var": VARIABLE}
    recipe = agents_recipe(folder, len(tasks()), data, env, **server)
    recipe["policy"]["generation"]["max_new_tokens"] = 24
    return recipe


@pytest.fixture(scope="module")
def gym(recipe: dict[str, Any]) -> Iterator[GymServer]:
    port = recipe["policy"]["generation"]["vllm_cfg"]["http_server_port"]
    gym = GymServer(f"http://127.0.0.1:{port}", TOKEN, recipe["policy"]["model_name"])
    recipe["env"]["nemo_gym"]["head_server_url"] = gym.head_url
    yield gym
    gym.close()


@pytest.fixture(scope="module")
def played(recipe: dict[str, Any], gym: GymServer, tmp_path_factory: pytest.TempPathFactory) -> Played:
    with pytest.MonkeyPatch.context() as patch, recording_groups() as found:
        patch.setitem(os.environ, VARIABLE, TOKEN)
        run = finished("train", tmp_path_factory.mktemp("run"), recipe)
    return Played(run, gym, {behaviour(group): group for group in found})


def behaviour(group: Group) -> str:
    task = group.prompt["extra_env_info"]["agent_task"]
    return task.get("behave") or f"{task.get('said_by', 'user')} {task['turns']}"


def test_the_contract_is_kept(played: Played) -> None:
    """Sessions are not mixed up, all sources of token ids agree, and failed rollouts get all their attempts."""
    assert played.gym.faults == []
    by_task = {row.get("behave"): number for number, row in enumerate(tasks()) if "behave" in row}
    tried = {name: played.gym.runs[number, 1] for name, number in by_task.items()}
    assert tried == {name: ATTEMPTS.get(name, 1) for name in by_task}


def test_what_fails_is_excluded_and_counted_never_scored_0(played: Played) -> None:
    for name, reason in FAILS.items():
        group = played.groups[name]
        assert group.scores[1].reward is None and reason in group.scores[1].reason, (name, group.scores[1])
        assert group.samples[1].ref is None
        assert group.scores[0].reward is not None and group.samples[0].turns == 2, "the other sample is whole"
    [line] = played.run.metrics()
    assert (line["num_failed_samples"], line["num_samples"]) == (len(FAILS), 2 * len(tasks()))
    assert line["num_trained_samples"] == line["num_samples"] - len(FAILS)
    assert f"samples without a reward, left out: {len(FAILS)}; the first, " in played.run.out


def test_conversations_are_exact_token_by_token(played: Played, recipe: dict[str, Any]) -> None:
    """Generated tokens are those that the engine sampled, and every later prompt begins with all tokens before it."""
    tokenizer = load_tokenizer(recipe["policy"]["model_name"])
    eos, cut_off = tokenizer.eos_token_id, 0
    for name in ("user 3", "tool 3", "user 40", "5xx once", "killed once"):
        group = played.groups[name]
        for sample, score in zip(group.samples, group.scores, strict=True):
            turns = sample.ref.turns
            generated, between = turns[1::2], turns[2::2]
            assert len(turns) == 2 * sample.turns
            question = group.prompt["extra_env_info"]["agent_task"]["responses_create_params"]["input"][0]["content"]
            assert tokenizer.decode(turns[0].token_ids) == f"<bos><user>{question}<assistant>"
            for number, (answer, said) in enumerate(zip(generated, between, strict=False)):
                assert answer.loss_mask and not said.loss_mask and said.logprobs is None
                ended = answer.token_ids[-1] == eos
                cut_off += not ended
                text = json.dumps({"seen": number}) if name.startswith("tool") else f"turn {number}: go on"
                role = "tool" if name.startswith("tool") else "user"
                shown = tokenizer.apply_chat_template(
                    [{"role": role, "content": text}], tokenize=False, add_generation_prompt=True
                )
                ids = tokenizer(shown.removeprefix("<bos>"), add_special_tokens=False)["input_ids"]
                assert said.token_ids.tolist() == ([] if ended else [eos]) + ids
            texts = "".join(tokenizer.decode(turn.token_ids, skip_special_tokens=True) for turn in generated)
            assert score.reward == float(len(texts) % 2) and score.rewards_by_name == {"odd": score.reward}
            assert sample.ref.weight_versions == ((1, 0, sample.length),)
            assert sample.length <= 160 and sample.turns == (
                len(generated) if name == "user 40" else group_turns(group)
            )
    assert cut_off > 10


def group_turns(group: Group) -> int:
    return group.prompt["extra_env_info"]["agent_task"]["turns"]


def test_a_conversation_ends_with_the_context(played: Played) -> None:
    for sample in played.groups["user 40"].samples:
        assert sample.truncated and 2 < sample.turns < 40 and sample.length > 160 - 40


def test_a_rewritten_history_is_a_branch_of_its_sample(played: Played) -> None:
    for name, turns in (("forgets", 4), ("rewrites", 3)):
        for sample, score in zip(played.groups[name].samples, played.groups[name].scores, strict=True):
            assert sample.turns == turns and score.reward is not None
            assert score.reason == f"{turns} turns in 2 branches"
            first, second = sample.ref.token_ids().split(sample.ref.branches)
            question = sample.ref.prompt_length
            assert first[:question].equal(second[:question]) and not first[: len(second)].equal(second[: len(first)])


def test_the_policy_learns_from_the_engines_own_log_probs(played: Played) -> None:
    """The policy's log-probs of these tokens equal those that came through the Gym, so no token was changed."""
    [line] = played.run.metrics()
    assert line["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert line["turns_max"] > 2 and line["grad_norm"] > 0
    for group in played.groups.values():
        for sample in group.samples:
            if sample.ref is not None:
                assert torch.isfinite(sample.ref.logprobs()).all()


def test_samples_of_a_prompt_differ(played: Played) -> None:
    seeds = [request["seed"] for request in played.gym.requests]
    assert len(set(seeds)) > len(tasks())
    first, second = (sample.ref.token_ids().tolist() for sample in played.groups["user 3"].samples)
    assert first != second


def test_the_address_of_the_endpoint_is_the_users_alone(played: Played, recipe: dict[str, Any]) -> None:
    file = played.run.logs / "endpoint.json"
    assert file.stat().st_mode & 0o077 == 0
    port = recipe["policy"]["generation"]["vllm_cfg"]["http_server_port"]
    assert json.loads(file.read_text()) == {
        "policy_base_url": f"http://127.0.0.1:{port}/v1",
        "policy_api_key": TOKEN,
        "policy_model_name": recipe["policy"]["model_name"],
    }
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "it has ended with the run"


def test_rollouts_are_collected_and_read_back(
    recipe: dict[str, Any], gym: GymServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collect rollouts of a Gym as it sent them, and of an environment here in the same form; read both as data."""
    monkeypatch.setenv(VARIABLE, TOKEN)
    tasks_file, rows_file = tmp_path / "gym.jsonl", tmp_path / "rows.jsonl"
    tasks_file.write_text(
        "".join(json.dumps(tasks()[n]) + "\n" for n in (0, len(PLAYED)))
    )  # the second task fails once
    rows_file.write_text(json.dumps({"input": "say a", "output": "a", "level": 3}) + "\n")
    entries = [
        {"dataset_name": "NemoGymDataset", "data_path": str(tasks_file), "env_name": "nemo_gym"},
        {"data_path": str(rows_file), "env_name": "says"},
    ]
    says = {"environment": "rules", "num_workers": 1, "components": {"a": {"type": "contains", "any": ["a"]}}}
    env = {"nemo_gym": recipe["env"]["nemo_gym"], "says": says}
    path = write_recipe(tmp_path, recipe | {"data": {"train": entries}, "env": env})
    output = tmp_path / "rollouts.jsonl"
    assert main(["data", "collect", str(path), "--output", str(output), "--num_repeats", "3", "--token_ids"]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    [failed] = [json.loads(line) for line in (tmp_path / "rollouts_failures.jsonl").read_text().splitlines()]
    assert failed["reward"] is None and "5" in failed["_ng_failure_message"] and failed["_ng_rollout_index"] == 1
    assert len(lines) == 8
    played = [line for line in lines if line["agent_ref"]["name"] == AGENT]
    mine = [line for line in lines if line["agent_ref"]["name"] == "says"]
    assert {len(line["response"]["output"]) for line in played} == {5, 3}, "3 turns and 2, what was said between too"
    assert sorted(line["_ng_rollout_index"] for line in mine) == [0, 1, 2]
    for line in mine:
        [item] = line["response"]["output"]
        assert line["reward"] == float("a" in item["content"][0]["text"]) and line["level"] == 3
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0
        assert line["responses_create_params"]["input"] == [{"role": "user", "content": "say a"}]
    grpo = tmp_path / "train.jsonl"
    words = ["--input", str(output), "--output", str(grpo), "--reward_threshold", "0.0"]
    assert main(["data", "gym-to-grpo", *words]) == 0
    rows = [json.loads(line) for line in grpo.read_text().splitlines()]
    texts = [line["response"]["output"][-1]["content"][0]["text"] for line in mine]
    assert [row["output"] for row in rows if row["input"] == "say a"] == texts
    assert {row["ground_truth"] for row in rows} == {"0", str(len(PLAYED)), "a"}
    assert (
        main(["data", "gym-to-sft", "--input", str(output), "--output", str(tmp_path / "sft.jsonl"), *words[4:]]) == 0
    )


def test_samples_are_played_ahead_of_the_policy(
    recipe: dict[str, Any], gym: GymServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of the second step start together with the first step's, and continue under the new weights."""
    monkeypatch.setenv(VARIABLE, TOKEN)
    ahead = json.loads(json.dumps(recipe))
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"task {n}"}]},
            "agent_ref": {"type": "responses_api_agents", "name": AGENT},
            "turns": 1 if n < 2 else 3,
            "behave": "waits" if n in (2, 3) else None,
        }
        for n in range(6)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ahead["data"] = {"train": {"dataset_name": "NemoGymDataset", "data_path": str(tmp_path / "tasks.jsonl")}}
    ahead["data"]["shuffle"] = False
    ahead["grpo"] |= {"num_prompts_per_step": 2, "max_num_steps": 3}
    ahead["grpo"]["async_grpo"] = {"enabled": True, "in_flight_weight_updates": True}
    ahead["loss_fn"]["use_importance_sampling_correction"] = True
    ahead["policy"]["train_global_batch_size"] = 4
    faults, asked = len(gym.faults), len(gym.requests)
    # The gate opens when the first step is done.
    with recording_groups(lambda groups: len(groups) == 2 and gym.open_gate()) as groups:
        run = finished("train", tmp_path, ahead)
    assert [line["trajectory_age_max"] for line in run.metrics()] == [0, 1, 1]
    assert [line["num_trained_samples"] for line in run.metrics()] == [4, 4, 4]
    assert all(line["grad_norm"] > 0 for line in run.metrics())
    assert run.metrics()[0]["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    found = audit(read_ledger(run.logs / "ledger.jsonl"))
    assert not found.flaws and found.fates["trained on"] == 6 == sum(found.fates.values())
    assert found.by_age == {0: 2, 1: 4}
    assert gym.faults[faults:] == [] and len(gym.requests) >= asked + 4 + 8 * 2
    samples = [sample for group in groups for sample in group.samples]
    spans = [sample.ref.weight_versions for sample in samples]
    assert any(len({version for version, _, _ in of}) > 1 for of in spans), spans
    for sample, of in zip(samples, spans, strict=True):
        versions = [version for version, _, _ in of]
        assert versions == sorted(set(versions)) and (of[0][1], of[-1][2]) == (0, sample.length)
        assert all(before[2] == after[1] for before, after in zip(of, of[1:], strict=False))


def test_calls_and_thoughts_are_read_with_vllms_parsers(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, string.printable, ("<think>", "</think>"))
    tokenizer = load_tokenizer(str(tmp_path))
    config = ChatConfig("policy", (Sampling(8),), tool_parser="hermes", reasoning_parser="deepseek_r1")
    reader = AnswerReader(tokenizer, config)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": "?"}]

    def read(text: str, **body: Any) -> dict[str, Any]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        request = ChatRequest.read({"messages": messages, **body}, config)
        return reader.message(request, [*ids, tokenizer.eos_token_id], tokenizer.eos_token_id)

    call = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    found = read(f"<think>so</think>sure{call}", tools=tools)
    assert (found["reasoning_content"], found["reasoning"], found["content"]) == ("so", "so", "sure")
    assert [c["function"] for c in found["tool_calls"]] == [{"name": "add", "arguments": '{"x": 1}'}]
    assert read(f"<think>so</think>{call}", tools=tools)["content"] is None
    two = f"<think>so</think>{call}{call}"
    assert len(read(two, tools=tools)["tool_calls"]) == 2
    assert len(read(two, tools=tools, parallel_tool_calls=False)["tool_calls"]) == 1
    broken = "<tool_call>{no json</tool_call>"
    assert read(f"<think>a</think>{broken}", tools=tools)["content"] == broken
    assert read(f"<think>a</think>{call}")["content"] == call, "there are no tools to call"
    assert "tool_calls" not in read(f"<think>a</think>{call}", tools=tools, tool_choice="none")

    def stopped(text: str, finish: str = "stop", **body: Any) -> tuple[Any, ...]:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        turn = Turn("assistant", ids, torch.zeros(len(ids)), True, text=text)
        request = ChatRequest.read({"messages": messages, "logprobs": True, **body}, config)
        answer = reader.completion(
            request, Trajectory("a", 0, (Turn("user", ids[:1]), turn), (), finish, finish == "length")
        )
        choice = answer["choices"][0]
        assert choice["message"]["generation_token_ids"] == ids.tolist(), "its tokens stay what the policy wrote"
        return choice["message"]["content"], choice["stop_reason"]

    thought = "<think>so</think>"
    assert stopped(f"{thought}1 END", stop=["x", " END"]) == ("1", " END")
    assert stopped(f"{thought}1 END", stop=" END", include_stop_str_in_output=True) == ("1 END", " END")
    assert stopped(f"{thought}1 END", "length", stop="END") == stopped(f"{thought}1 END") == ("1 END", None)
    for parser, what in (("deepseek_v3", "could not locate tool call"), ("openai", "is not gpt-oss's")):
        with pytest.raises(ValueError, match=f"tool_parser.*{parser}.* cannot be used with this model's .*{what}"):
            AnswerReader(tokenizer, ChatConfig("policy", (Sampling(8),), tool_parser=parser))
    with pytest.raises(ValueError, match="http_server_serving_chat_kwargs.tool_parser: .*nobody"):
        AnswerReader(tokenizer, ChatConfig("policy", (Sampling(8),), tool_parser="nobody"))


@pytest.mark.parametrize(("of_recipe", "of_request"), [(False, None), (True, False), (None, None)])
def test_an_answer_without_a_thought_is_its_content(
    tmp_path: Path, of_recipe: bool | None, of_request: bool | None
) -> None:
    """Qwen 3's parser takes all that is not behind </think> for a thought, unless thoughts are switched off."""
    make_tokenizer(tmp_path, string.printable, ("<think>", "</think>", "<tool_call>", "</tool_call>"))
    tokenizer = load_tokenizer(str(tmp_path))
    switched = {} if of_recipe is None else {"enable_thinking": of_recipe}
    config = ChatConfig("policy", (Sampling(8),), chat_template_kwargs=switched, reasoning_parser="qwen3")
    body = {} if of_request is None else {"chat_template_kwargs": {"enable_thinking": of_request}}
    request = ChatRequest.read({"messages": [{"role": "user", "content": "?"}], **body}, config)
    found = AnswerReader(tokenizer, config).message(request, tokenizer("It is 82.")["input_ids"], None)
    off = False in (of_recipe, of_request)
    assert (found["content"], found.get("reasoning_content")) == (("It is 82.", None) if off else ("", "It is 82."))


@pytest.mark.parametrize(("family", "switched"), [("qwen3_coder", None), ("glm45", None), ("glm45", False)])
def test_thoughts_that_no_parser_takes_stay_in_the_content(tmp_path: Path, family: str, switched: bool | None) -> None:
    """As in vLLM's server. Their parsers of calls dropped </think>, or the whole thought with its marks, so that an
    agent took a thought for the answer, or found none."""
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")
    make_tokenizer(tmp_path, string.printable, (*marks, "</arg_value>"))
    tokenizer = load_tokenizer(str(tmp_path))
    reasoning, kwargs = (None, {}) if switched is None else ("glm45", {"enable_thinking": switched})
    config = ChatConfig("policy", (Sampling(8),), None, kwargs, family, reasoning)
    reader = AnswerReader(tokenizer, config)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    request = ChatRequest.read({"messages": [{"role": "user", "content": "?"}], "tools": tools}, config)
    for said in ("<think>so</think>It is 2.", "so</think>It is 2.", "<think>it was cut"):
        ids = tokenizer(said, add_special_tokens=False)["input_ids"]
        assert reader.message(request, ids, None) == {"role": "assistant", "content": said}


def test_channels_of_gpt_oss_are_read_as_thoughts_texts_and_calls() -> None:
    """vLLM has one parser of channels; its parsers by name are stubs. The tokens are those of OpenAI's package."""
    harmony = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    vocabulary = {harmony.decode([i]): i for i in [*range(32, 2000), *range(200002, 200013)]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="!")), unk_token="!")
    config = ChatConfig("policy", (Sampling(8),), tool_parser="openai", reasoning_parser="openai_gptoss")
    reader = AnswerReader(tokenizer, config)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

    def read(text: str, stop: str | None = None, **body: Any) -> dict[str, Any]:
        ids = harmony.encode(text, allowed_special="all")
        request = ChatRequest.read({"messages": [{"role": "user", "content": "?"}], **body}, config)
        return reader.message(request, ids, ids[-1], stop)

    thought = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>'
    found = read(thought + call, tools=tools)
    assert (found["reasoning_content"], found["content"]) == ("I add.", None)
    assert [c["function"] for c in found["tool_calls"]] == [{"name": "add", "arguments": '{"x": 1}'}]
    said = read(thought + "<|channel|>final<|message|>It is 2 END<|return|>", " END", tools=tools)
    both = {"reasoning_content": "I add.", "reasoning": "I add."}
    assert said == {"role": "assistant", **both, "content": "It is 2"}
    assert read(thought + call)["content"] == "", "there are no tools to call"
    assert read("<|channel|>analysis<|message|>I ad")["reasoning_content"] == "I ad", "it was cut off"
