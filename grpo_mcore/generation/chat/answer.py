"""Conversion of a generated sample to a chat completion: its tokens, and the text, tool calls and reasoning that vLLM's
parsers find in them."""

import time
import uuid
from typing import Any

from grpo_mcore.generation.chat.request import ChatRequest
from grpo_mcore.generation.config import ChatConfig
from grpo_mcore.rollout.text_tokens import text_of
from grpo_mcore.rollout.trajectory import Trajectory

_HARMONY = {"openai", "openai_gptoss"}
"""Names of gpt-oss's parsers, which vLLM has as one: calls and thoughts stand in channels, told apart by tokens."""
_CHANNEL = ("<|channel|>", 200005)
_KEYS = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs."


class AnswerReader:
    """Reads answers with one tokenizer. Raises ValueError if vLLM does not know a parser, or if a parser cannot be used
    with the tokenizer, such as one that looks for a token of another family."""

    def __init__(self, tokenizer: Any, config: ChatConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._parsers: dict[bool, Any] = {False: None, True: None}  # by whether a request has tools
        self._harmony: Any = None
        tool_plugin, reasoning_plugin = config.plugins
        if config.tool_parser or config.reasoning_parser:
            from vllm.parser import ParserManager
        if {config.tool_parser, config.reasoning_parser} & _HARMONY:
            names = config.tool_parser, config.reasoning_parser
            if tokenizer.convert_tokens_to_ids(_CHANNEL[0]) != _CHANNEL[1]:
                raise ValueError(
                    f"{_KEYS}tool_parser, reasoning_parser: {names} cannot be used with this model's tokenizer, "
                    "which is not gpt-oss's; choose the parsers of the model's family"
                )
            self._harmony = ParserManager.get_parser(*names, enable_auto_tools=True, is_harmony=True)
        elif config.tool_parser:
            from vllm.tool_parsers import ToolParserManager

            if tool_plugin:
                ToolParserManager.import_tool_parser(tool_plugin)
            _check_parser(ToolParserManager.get_tool_parser, config.tool_parser, "tool_parser")
        if config.reasoning_parser and self._harmony is None:
            from vllm.reasoning import ReasoningParserManager

            if reasoning_plugin:
                ReasoningParserManager.import_reasoning_parser(reasoning_plugin)
            get = ReasoningParserManager.get_reasoning_parser
            _check_parser(get, config.reasoning_parser, "reasoning_parser")
        if self._harmony is None and (config.tool_parser or config.reasoning_parser):
            # As in vLLM's server: the parser of calls must know whether there is one that takes the thoughts.
            for with_tools in self._parsers:
                names = config.tool_parser if with_tools else None, config.reasoning_parser
                self._parsers[with_tools] = ParserManager.get_parser(*names, enable_auto_tools=True)
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        question = {"role": "user", "content": "question"}
        for key, name, tools in (
            ("reasoning_parser", config.reasoning_parser, None),
            ("tool_parser", config.tool_parser, [tool]),
        ):
            try:
                request = ChatRequest.read({"messages": [question], "tools": tools}, config)
                self.message(request, tokenizer.encode("a"), None)
            except Exception as error:  # vLLM's parsers raise many kinds
                raise ValueError(
                    f"{_KEYS}{key}: {name} cannot be used with this model's tokenizer: {type(error).__name__}: "
                    f"{error}; choose the parser of the model's family"
                ) from error

    def completion(self, request: ChatRequest, trajectory: Trajectory) -> dict[str, Any]:
        """Return the body of the answer in the form of the OpenAI API with vLLM's extensions."""
        generated = trajectory.turns[-1]
        assert generated.logprobs is not None
        ids, logprobs = generated.token_ids.tolist(), generated.logprobs.tolist()
        all_ids = trajectory.content_ids().tolist()
        prompt = all_ids[: len(all_ids) - len(ids)]
        reason = {"length": "length", "abort": "abort"}.get(trajectory.finish_reason, "stop")
        by_text = reason == "stop" and trajectory.stop_token is None
        stop = next((text for text in request.stops if by_text and generated.text.endswith(text)), None)
        message = self.message(request, ids, trajectory.stop_token, stop)
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if reason == "stop" and message.get("tool_calls") else reason,
            "stop_reason": stop,
        }
        if request.logprobs:
            message["prompt_token_ids"] = prompt
            message["generation_token_ids"] = ids
            message["generation_log_probs"] = logprobs
            as_ids, decode = request.return_tokens_as_token_ids, self._tokenizer.decode
            names = [f"token_id:{i}" if as_ids else decode([i]) for i in ids]
            choice["logprobs"] = {
                "content": [
                    {"token": name, "logprob": value, "bytes": None, "top_logprobs": []}
                    for name, value in zip(names, logprobs, strict=True)
                ]
            }
        body = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._config.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt) + len(ids),
            },
        }
        if request.return_token_ids:
            body["prompt_token_ids"], choice["token_ids"] = prompt, ids
        return body

    def message(
        self, request: ChatRequest, ids: list[int], stop_token: int | None, stop: str | None = None
    ) -> dict[str, Any]:
        """Return the assistant's message: `content`, plus `tool_calls`, `reasoning_content` and `reasoning` if parsers
        find any.
        `stop`: text of the client's at which the answer ended; it is not in the message, but its tokens stay tokens."""
        if self._harmony is not None:
            return self._message_of_channels(request, ids, stop)
        tools = request.tools if self._config.tool_parser and request.tool_choice != "none" else None
        keep_special = request.skip_special_tokens is False
        # By them parsers know whether the prompt has opened a thought: enable_thinking of Qwen 3, thinking of DeepSeek.
        variables = {**self._config.chat_template_kwargs, **(request.chat_template_kwargs or {})}
        text_ids = ids if stop_token is None else ids[:-1]
        parser: Any = None
        if (parser_class := self._parsers[bool(tools)]) is not None:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

            fields = {"tools": tools, "tool_choice": "auto"} if tools else {}
            parsed = ChatCompletionRequest(
                model=self._config.model, messages=[], chat_template_kwargs=variables, **fields
            )
            parser = parser_class(self._tokenizer, parsed.tools, chat_template_kwargs=variables)
            if tools:
                parsed = parser.tool_parser.adjust_request(parsed)  # sets skip_special_tokens as the parser needs it
                keep_special |= not parsed.skip_special_tokens
        if keep_special or not self._config.reasoning_parser:
            text = str(self._tokenizer.decode(text_ids, skip_special_tokens=not keep_special))
        else:
            text = text_of(self._tokenizer, text_ids)  # which look for the marks of thoughts
        if stop is not None and not request.include_stop_str_in_output:
            text = text.partition(stop)[0]
        if parser is None:
            return _message(request, None, text, None)
        return _message(request, *parser.parse(text, parsed, enable_auto_tools=True, model_output_token_ids=text_ids))

    def _message_of_channels(self, request: ChatRequest, ids: list[int], stop: str | None) -> dict[str, Any]:
        """Return the message of an answer in gpt-oss's channels. One that has none stays text."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        parser = self._harmony(self._tokenizer)
        empty = ChatCompletionRequest(model=self._config.model, messages=[])
        reasoning, content, calls = parser.parse("", empty, enable_auto_tools=True, model_output_token_ids=ids)
        calls = calls if request.tools and request.tool_choice != "none" else None
        if not (reasoning or content or calls):
            content = self._tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens is not False)
        if content and stop is not None and not request.include_stop_str_in_output:
            content = content.partition(stop)[0]
        return _message(request, reasoning, content, calls)


def _message(request: ChatRequest, reasoning: str | None, content: str | None, calls: Any) -> dict[str, Any]:
    """Return an assistant's message of what vLLM's parsers found. `calls`: its FunctionCalls. A thought has two names:
    vLLM's own since 0.16, and the older one, which litellm and most agents read."""
    message: dict[str, Any] = {"role": "assistant"}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        from vllm.renderers.chat_utils import make_tool_call_id

        message["tool_calls"] = [
            {
                "id": call.id or make_tool_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in (calls[:1] if request.parallel_tool_calls is False else calls)
        ]
    message["content"] = content or (None if calls else "")
    return message


def _check_parser(get: Any, name: str, key: str) -> None:
    try:
        get(name)
    except KeyError as error:
        raise ValueError(f"{_KEYS}{key}: {error.args[0]}") from error
