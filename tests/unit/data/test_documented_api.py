"""The Python of the documents that the project was created from runs as written, with the package's name changed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from grpo_mcore.cluster import LocalCluster
from grpo_mcore.data import (
    AllTaskProcessedDataset,
    BatchedDataDict,
    DataError,
    DatumSpec,
    MultipleDataloaderWrapper,
    RawDataset,
    TaskDataSpec,
    build_dataloader,
    build_task_data,
    extract_necessary_env_names,
    load_response_dataset,
)
from grpo_mcore.data.multiple_loaders import by_column
from grpo_mcore.data.processors import math_data_processor
from grpo_mcore.driver.rollouts.scoring import as_workers
from grpo_mcore.environments import create_env
from grpo_mcore.environments.gym.nemo_gym import NemoGymEnvironment
from grpo_mcore.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    response_text,
    single_turn_return,
)
from grpo_mcore.environments.math.math_environment import MathEnvironment
from grpo_mcore.environments.registry import EnvironmentConfigError
from grpo_mcore.recipe import MasterConfig
from grpo_mcore.rollout.trajectory import Trajectory, Turn
from tests.unit.data.conftest import sums


def my_data_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    """A processor with the documented fields only: no uid, no task_name."""
    tokens = torch.tensor(tokenizer(datum_dict["problem"])["input_ids"])
    return {
        "message_log": [{"role": "user", "content": datum_dict["problem"], "token_ids": tokens}],
        "length": len(tokens),
        "extra_env_info": {"ground_truth": datum_dict["expected_answer"]},
        "loss_multiplier": 1.0,
        "idx": idx,
    }  # type: ignore[typeddict-item]


ROWS = [{"problem": f"{number}+1=", "expected_answer": str(number + 1)} for number in range(4)]


@pytest.mark.parametrize("processor", [my_data_processor, math_data_processor])
def test_rows_without_uid_through_a_defaultdict_of_processors(tokenizer: Any, processor: Any) -> None:
    spec = TaskDataSpec("math")
    processors: Any = defaultdict(lambda: (spec, processor))
    processors["math"] = (spec, processor)
    dataset = AllTaskProcessedDataset([ROWS[0] | {"task_name": "math"}, *ROWS], tokenizer, spec, processors, 64)
    data = [dataset[index] for index in range(5)]
    assert [datum["uid"] for datum in data] == [f"math:{index}" for index in range(5)]
    assert {datum["task_name"] for datum in data} == {"math"}
    assert len(next(iter(build_dataloader(dataset, 5, shuffle=False, seed=0)))) == 5


class Sums(RawDataset):
    """A dataset class with the documented attributes only."""

    def __init__(self, entry: Any) -> None:
        self.task_name = "sums"
        self.dataset = [self.format_data(row) for row in ROWS]
        self.val_dataset = None
        self.split_train_validation(entry["split_validation_size"], entry["seed"])

    def format_data(self, data: dict[str, Any]) -> dict[str, Any]:
        return {
            "messages": [
                {"role": "user", "content": data["problem"]},
                {"role": "assistant", "content": data["expected_answer"]},
            ],
            "task_name": self.task_name,
        }


class SumsByPart:
    """A dataset class whose `dataset` is a dictionary of formatted datasets."""

    def __init__(self, entry: Any) -> None:
        rows = Sums(entry | {"split_validation_size": 0}).dataset
        self.dataset, self.task_name = {"train": rows[:3], "validation": rows[3:]}, "sums"


class Nameless:
    def __init__(self, entry: Any) -> None:
        self.dataset = ROWS


@pytest.mark.parametrize("name", ["Sums", "SumsByPart"])
def test_a_dataset_class_with_the_documented_attributes(tokenizer: Any, name: str) -> None:
    entry = {"dataset_name": f"{__name__}.{name}", "split_validation_size": 1, "seed": 3, "env_name": "math"}
    data = build_task_data([entry], [], tokenizer, 64)
    assert data.env_names == {"sums": "math"}
    assert data.validation is not None and len(data.train) == 3 and len(data.validation) == 1
    uids = [datum["uid"] for part in (data.train, data.validation) for datum in part]
    assert len(set(uids)) == 4 and data.train[0]["extra_env_info"]["ground_truth"] in "1234"


def test_a_dataset_class_without_them_is_one_message() -> None:
    with pytest.raises(DataError, match="Nameless: a dataset class needs the attributes task_name"):
        load_response_dataset({"dataset_name": f"{__name__}.Nameless"})


@pytest.fixture
def config(write_jsonl: Any) -> MasterConfig:
    return MasterConfig.model_validate(
        {
            "policy": {"model_name": "m"},
            "data": {
                "train": {"data_path": write_jsonl("a.jsonl", sums(6)), "env_name": "math"},
                "validation": {"data_path": write_jsonl("b.jsonl", sums(2)), "env_name": "math"},
                "max_input_seq_length": 64,
            },
            "env": {"math": {"num_workers": 1}},
        }
    )


@pytest.mark.slow
def test_datasets_and_environments_from_a_mapping(config: MasterConfig, tokenizer: Any) -> None:
    """The example that builds datasets and environments, word by word."""
    data_config, env_configs = config["data"], config["env"]
    env_name_list = extract_necessary_env_names(data_config)
    envs = {env_name: create_env(env_name=env_name, env_config=env_configs[env_name]) for env_name in env_name_list}
    data = load_response_dataset(data_config["train"])
    task_data_processors = {data.task_name: (data.task_spec, data.processor)}
    task_to_env = {data.task_name: envs[data_config["train"]["env_name"]]}
    dataset = AllTaskProcessedDataset(
        data.dataset, tokenizer, None, task_data_processors, max_seq_length=data_config["max_input_seq_length"]
    )
    if "validation" in data_config and data_config["validation"] is not None:
        val_data = load_response_dataset(data_config["validation"])
        val_dataset = AllTaskProcessedDataset(
            val_data.dataset, tokenizer, None, {val_data.task_name: (val_data.task_spec, val_data.processor)}, 64
        )
    assert len(dataset) == 6 and len(val_dataset) == 2 and isinstance(task_to_env[data.task_name], MathEnvironment)
    envs["math"].shutdown()


def test_the_configuration_is_a_mapping(config: MasterConfig) -> None:
    def take(policy: Any, data: Any, **others: Any) -> Any:
        return policy["model_name"], dict(data)["shuffle"], sorted(others)

    assert take(**config) == ("m", True, sorted(set(config.keys()) - {"policy", "data"}))
    assert dict(**config["grpo"])["num_prompts_per_step"] == 32
    plain = json.loads(json.dumps(config.model_dump()))
    assert plain["data"]["train"][0]["env_name"] == "math", "a dump has lists"
    several = MasterConfig.model_validate(plain | {"data": plain["data"] | {"train": plain["data"]["train"] * 2}})
    assert len(several["data"]["train"]) == 2
    none = MasterConfig.model_validate(plain | {"data": plain["data"] | {"validation": None}})
    assert none["data"]["validation"] is None and none["data"].get("validation") is None


def test_names_of_environments_from_a_plain_mapping() -> None:
    found = extract_necessary_env_names(
        {"train": [{"env_name": "a"}, {}], "validation": {"env_name": "b"}, "default": {"env_name": "a"}}
    )
    assert found == ["a", "b"] and extract_necessary_env_names({"train": {}, "validation": None}) == []


class Length(EnvironmentInterface):
    """Rewards an answer by its number of characters."""

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        rewards = [float(len(response_text(messages))) * self.config["factor"] for messages in message_log_batch]
        return single_turn_return(metadata, rewards, [""] * len(rewards), [0.0] * len(rewards))


def test_an_environment_started_by_remote() -> None:
    env = Length.remote({"factor": 2})
    with LocalCluster() as cluster:
        worker = as_workers({"length": env}, cluster)["length"]
        assert as_workers({"length": env}, cluster)["length"] is worker, "started once"
        turns = (
            Turn("user", torch.tensor([1, 2])),
            Turn("assistant", torch.tensor([3]), torch.tensor([-0.1]), True, "abc"),
        )
        sample = Trajectory("length:0", 0, turns, ((0, 0, 3),), "stop", False)
        (outcome,) = worker.worker.call("advance", [{}], sample).result()
        assert outcome.reward == 6.0


class OnGPU(Length):
    @classmethod
    def resources(cls, config: Any) -> dict[str, float]:
        return {"cpus": 2.0, "gpus": 1.0}


@pytest.mark.parametrize(("platform", "gpus"), [("cpu", 0.0), ("gpu", 1.0), ("auto", 1.0)])
def test_it_gets_the_devices_of_the_recipes_platform(
    monkeypatch: pytest.MonkeyPatch, platform: Any, gpus: float
) -> None:
    """On a machine with a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    asked: dict[str, float] = {}

    class Devices(LocalCluster):
        def spawn(self, name: str, cls: Any, *args: Any, cpus: float, gpus: float, **how: Any) -> Any:
            asked.update(cpus=cpus, gpus=gpus)
            return super().spawn(name, cls, *args, cpus=cpus, gpus=0.0, **how)

    with Devices() as cluster:
        as_workers({"length": OnGPU.remote({"factor": 2})}, cluster, platform)
    assert asked == {"cpus": 2.0 if gpus else 0.1, "gpus": gpus}


@pytest.mark.parametrize(("cls", "section"), [(MathEnvironment, {"workers": 1}), (NemoGymEnvironment, {})])
def test_remote_refuses_a_wrong_section_at_once(cls: Any, section: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentConfigError):
        cls.remote(section)


def test_a_custom_data_loader_has_a_reward_from_the_start(write_jsonl: Any, tokenizer: Any) -> None:
    """`reward = kwargs["reward"]`, before and after the first step."""
    data = build_task_data([{"data_path": write_jsonl("a.jsonl", sums(6))}], [], tokenizer, 64, separate=True)
    seen: list[float] = []

    def custom(data_iterators: dict[str, Iterator[Any]], dataloaders: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["reward"])
        return BatchedDataDict.from_batches([next(iterator) for iterator in data_iterators.values()]), data_iterators

    loaders = {name: build_dataloader(rows, 2, False, 0, collate=by_column) for name, rows in data.train.items()}
    wrapped_dataloader = MultipleDataloaderWrapper(2, custom, loaders)
    next(wrapped_dataloader)
    wrapped_dataloader.set_records({"reward": 0.5})
    next(wrapped_dataloader)
    assert seen == [0.0, 0.5]
