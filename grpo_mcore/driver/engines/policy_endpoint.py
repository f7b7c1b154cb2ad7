"""The policy's OpenAI-compatible endpoint, as the recipe configures it."""

import json
import os
import secrets
from pathlib import Path

from grpo_mcore.data.tokenizer import load_tokenizer, template_text
from grpo_mcore.driver.engines.engine_group import EngineGroup
from grpo_mcore.driver.engines.sampling_config import sampling_of
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.generation.endpoint import Endpoint, EndpointError
from grpo_mcore.recipe import MasterConfig

ENDPOINT_FILE = "endpoint.json"
"""File in the run's logs with the endpoint's address and token. Only the user may read it."""

REQUESTS = 256
"""Maximum concurrent requests per engine. Each uses one thread; further requests queue."""


def chat_config(config: MasterConfig) -> ChatConfig | None:
    """Return the engines' chat settings; None if the recipe exposes no endpoint."""
    generation, names = config.policy.generation, config.policy.tokenizer
    vllm = generation.vllm_cfg
    if not vllm.expose_http_server:
        return None
    name = names.name or config.policy.model_name
    tokenizer = load_tokenizer(name, names.chat_template, names.chat_template_kwargs)
    training = sampling_of(generation, tokenizer)
    validation = sampling_of(generation, tokenizer, validation=True)
    kwargs = vllm.http_server_serving_chat_kwargs
    return ChatConfig(
        model=config.policy.model_name,
        samplings=tuple(dict.fromkeys([training, validation])),
        chat_template=template_text(names.chat_template) if names.chat_template else None,
        chat_template_kwargs=names.chat_template_kwargs or {},
        tool_parser=kwargs.tool_parser,
        reasoning_parser=kwargs.reasoning_parser,
        plugins=(vllm.tool_parser_plugin, vllm.reasoning_parser_plugin),
    )


def open_endpoint(config: MasterConfig, engines: EngineGroup, log_dir: Path) -> Endpoint | None:
    """Open the endpoint on the cluster's network, and write address and token to `log_dir`/endpoint.json. Return None
    if the recipe exposes none. Raises EndpointError."""
    vllm, cluster = config.policy.generation.vllm_cfg, engines.cluster
    if not vllm.expose_http_server:
        return None
    endpoint = Endpoint(
        engines,
        model=config.policy.model_name,
        token=_token(vllm.http_server_api_key_env_var),
        host=vllm.http_server_host or cluster.address,
        port=vllm.http_server_port or 0,
        seed=config.grpo.seed,
        timeout_s=cluster.call_timeout_s,
        max_requests=REQUESTS * len(engines.workers),
        reads_calls=vllm.http_server_serving_chat_kwargs.tool_parser is not None,
    )
    contents = {
        "policy_base_url": f"{endpoint.address.url}/v1",
        "policy_api_key": endpoint.address.token,
        "policy_model_name": endpoint.address.model,
    }
    log_dir.mkdir(parents=True, exist_ok=True)
    file = os.open(log_dir / ENDPOINT_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(file, "w", encoding="utf-8") as text:
        json.dump(contents, text, indent=2)
    return endpoint


def _token(variable: str | None) -> str:
    if variable is None:
        return secrets.token_urlsafe(32)
    token = os.environ.get(variable, "")
    if len(token) < 8:
        raise EndpointError(
            f"policy.generation.vllm_cfg.http_server_api_key_env_var: the variable {variable} must hold the endpoint's "
            f"token, of 8 characters or more; it has {len(token)}"
        )
    return token
