"""`model_overrides`: each field that may be set acts, and no other may."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mcore.families import FamilyError, shape_of
from grpo_mcore.families.known import known_configs
from grpo_mcore.layout import PolicyLayout
from grpo_mcore.parallel.mesh import prepare_megatron
from grpo_mcore.parallel.platform import Platform
from grpo_mcore.recipe import MegatronConfig

prepare_megatron(Platform.detect())

from megatron.core.models.common.language_module.language_module import LanguageModule  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.tensor_parallel import VocabParallelEmbedding, layers  # noqa: E402

from grpo_mcore.parallel import settings  # noqa: E402


def config(model: str = "Qwen3-8B", **overrides: Any) -> Any:
    arguments = PolicyLayout(1, 1, 1), MegatronConfig(model_overrides=overrides), torch.bfloat16, Platform("cpu")
    return settings.transformer_config(shape_of(known_configs()[model]), *arguments)


def test_a_backend_of_attention_is_the_only_one_that_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    for backend, expected in (("flash", "100"), ("fused", "010"), ("unfused", "001")):
        for name in names:
            monkeypatch.setenv(name, "")  # so that it is not there again after the test
            monkeypatch.delenv(name)
        LanguageModule._set_attention_backend(SimpleNamespace(config=config(attention_backend=backend)))
        assert "".join(os.environ[name] for name in names) == expected


@pytest.mark.parametrize(("fixed", "backward"), [(False, "EmbeddingBackward0"), (True, "IndexBackward0")])
def test_the_gradient_of_embeddings_can_be_added_in_a_fixed_order(
    fixed: bool, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    monkeypatch.setattr(layers, "get_tensor_model_parallel_group_if_none", lambda group: group)
    monkeypatch.setattr(layers, "get_pg_rank", lambda group: 0)
    monkeypatch.setattr(layers, "get_pg_size", lambda group: 1)
    monkeypatch.setattr(layers, "reduce_from_tensor_model_parallel_region", lambda output, **_: output)
    table = VocabParallelEmbedding(
        8, 4, init_method=torch.nn.init.zeros_, config=config(deterministic_mode=fixed), tp_group=group
    )
    assert table(torch.tensor([[1, 2]])).grad_fn.name() == backward


@pytest.mark.parametrize("waits", [False, True])
def test_messages_between_stages_need_not_wait_for_the_device(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    stage = object.__new__(P2PCommunicator)
    stage.config = config(batch_p2p_sync=waits)
    stage.config.variable_seq_lengths, stage.pp_group = False, SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    stage.next_rank = stage.prev_rank = 1
    nothing = dict(tensor_send_next=None, tensor_send_prev=None, recv_prev=False, recv_next=False)
    stage._communicate(**nothing, tensor_shape=[1])
    assert bool(waited) == waits


@pytest.mark.parametrize(
    ("model", "overrides", "problem"),
    [
        ("Qwen3-8B", {"hidden_size": 7}, "model_overrides.hidden_size: decided by the model or by another key"),
        ("DeepSeek-V3", {"rotary_percent": 0.5}, "model_overrides.rotary_percent: it would have no effect, or compute"),
        ("Qwen3-8B", {"qk_clip": True}, "model_overrides.qk_clip: it would have no effect"),
        ("Qwen3-8B", {"fp16": True}, "model_overrides.fp16: it would have no effect"),
        ("Qwen3-8B", {"window_size": [3, 0]},
         "model_overrides.window_size: it would have no effect, or compute another"),
        ("Qwen3-8B", {"batch_p2p_sink": True}, "can be set; nearest: batch_p2p_sync"),
        ("Qwen3-8B", {"attention_backend": "local"}, "attention_backend: expected one of .*, got 'local'"),
        ("Qwen3-8B", {"batch_p2p_sync": 1}, "batch_p2p_sync: expected one of false, true, got 1"),
        ("Qwen3-8B", {"deterministic_mode": [True]}, "deterministic_mode: expected one of false, true, got"),
    ],
)  # fmt: skip
def test_no_other_field_may_be_set(model: str, overrides: dict[str, Any], problem: str) -> None:
    with pytest.raises(FamilyError, match=problem):
        config(model, **overrides)


def test_each_field_has_a_test_that_it_acts() -> None:
    assert set(settings.OVERRIDES) == {"attention_backend", "deterministic_mode", "batch_p2p_sync"}
