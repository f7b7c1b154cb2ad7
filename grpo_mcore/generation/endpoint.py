"""The OpenAI-compatible endpoint: an HTTP server in front of the engines.

    POST /v1/chat/completions, GET /v1/models, POST /tokenize     as in vLLM
    POST /v1/responses, /v1/messages, /v1/messages/count_tokens   the same completions in other forms (dialects.py)
    POST /weight_versions {"fingerprints": [...]}                 weights that generated these tokens; null: none here
    POST /take_session {"session": "..."}                         the tokens of all calls of a session (sessions.py)
    GET  /health                                                  needs no token, unlike all others

It runs in the driver, in threads: each request waits for one engine. Clients without the token get no further than
their headers, for which they have HEADER_S seconds, and cannot take all of the driver's file descriptors.
"""

import asyncio
import hmac
import json
import logging
import resource
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

from aiohttp import web

from grpo_mcore.base.addresses import with_port
from grpo_mcore.base.text import has_surrogates
from grpo_mcore.generation.chat.dialects import CHAT, COUNTED_MESSAGES, MESSAGES, RESPONSES, Dialect, DialectError
from grpo_mcore.generation.chat.engine_chat import Reply
from grpo_mcore.generation.chat.prompt import TOKEN_FIELDS
from grpo_mcore.generation.chat.sessions import SESSION_HEADER, ChatSession, ChatSessions
from grpo_mcore.generation.engine import Engine
from grpo_mcore.rollout.images import image_of_part, inline_image, take_images
from grpo_mcore.rollout.messages import read_messages
from grpo_mcore.rollout.trajectory import (
    FIRST_CONTENT,
    ImageSpan,
    Trajectory,
    content_number,
    fingerprint,
    sample_seed,
    with_spans,
)
from grpo_mcore.rollout.workers import remote_stream

Spans = tuple[tuple[int, int, int], ...]

MAX_REMEMBERED = 200_000
"""Maximum number of remembered completions (about 60 MB): more than are ever in flight."""

MAX_IMAGE_BYTES = 2 * 2**30
"""Maximum size of the remembered images: many more than agents have in flight."""

MAX_BODY_BYTES = 64 * 2**20
"""Maximum size of a request: a long conversation carries all its tokens as JSON, about 7 bytes each, twice."""

LONGEST_WARNING, MAX_WARNINGS = 500, 1000
"""Characters of a warning, and number of different ones that are logged: agents ask often."""

MAX_EXTRA_PENDING = 4
"""How many extra pending requests an engine may have and still be preferred because it has the conversation cached."""

HEADER_S, BODY_S = 10.0, 300.0
"""Seconds in which a new connection must have sent the headers of its first request, and a request its body."""

MAX_CONNECTIONS = 4096
"""Maximum number of open connections; at most half of the process's file descriptors. Further ones are closed."""

MAX_NESTING = 100
"""Maximum depth of a request's JSON. Python's own limit differs between parsing, hashing and sending to an engine."""

_COMPLETIONS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": MESSAGES}

START_TIMEOUT_S = 30.0
POLL_S = 0.1

log = logging.getLogger(__name__)


class EndpointError(RuntimeError):
    """The endpoint cannot listen at its address."""


class ChatEngine(Protocol):
    """A handle on an engine."""

    name: str

    def stream(self, method: str, *args: Any, timeout_s: float | None = None, purpose: str | None = None) -> Any: ...


class ChatEngines(Protocol):
    """Handles on engines that were started with a ChatConfig. Their number is fixed; a new engine takes the place of a
    dead one. `weight_version`: number of the last refit."""

    @property
    def workers(self) -> Sequence[ChatEngine]: ...

    @property
    def weight_version(self) -> int: ...

    def reachable(self) -> list[int]:
        """Return the numbers of the engines that can take requests."""

    @property
    def returning(self) -> bool:
        """Return whether an engine is being restarted."""

    def unanswered(self, engine: ChatEngine, error: Exception) -> bool:
        """Record a failed request. Return whether the engine is gone, so that another can take the request."""


@dataclass(frozen=True)
class EndpointAddress:
    """Address for clients. `url` ends before the API's `/v1`."""

    url: str
    token: str
    model: str


class ChatRecord:
    """Remembers completions. Several threads may use it. `seed`: seed of the run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._generated: OrderedDict[str, tuple[Spans, int, bytes]] = OrderedDict()
        self._asked: Counter[bytes] = Counter()
        self._version = 0
        self._images: OrderedDict[int, tuple[ImageSpan, bytes]] = OrderedDict()  # by content_number
        self._image_bytes = 0

    def seed(self, body: Mapping[str, Any], weight_version: int) -> int:
        """Derive a seed for a request from its own, or else from the run's seed, the weight version and the request,
        and from the number of equal requests before it. So the samples of a prompt differ, even if an agent repeats a
        request and its Gym gives all requests one seed; and a rerun draws the same samples."""
        key = blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16)
        with self._lock:
            if weight_version != self._version:
                self._asked.clear()
                self._version = weight_version
            number = self._asked[key.digest()]
            self._asked[key.digest()] += 1
        if type(seed := body.get("seed")) is int:
            return sample_seed(seed, 0, "again", number) if number else seed
        return sample_seed(self._seed, weight_version, key.hexdigest(), number)

    def note(self, fingerprint: str, spans: Spans, engine: int, messages: Sequence[Any] = ()) -> None:
        """Remember a completion. `fingerprint`: digest of its prompt and answer together; `messages`: the messages of
        its request."""
        with self._lock:
            self._generated[fingerprint] = spans, engine, _told(messages)
            while len(self._generated) > MAX_REMEMBERED:
                self._generated.popitem(last=False)

    def note_images(self, spans: Sequence[ImageSpan], files: Sequence[bytes]) -> None:
        """Remember the images of a prompt, in their order."""
        with self._lock:
            for span, file in zip(spans, files, strict=True):
                number = content_number(span.digest)
                self._image_bytes += 0 if number in self._images else len(file)
                self._images[number] = span, file
                self._images.move_to_end(number)
            while self._image_bytes > MAX_IMAGE_BYTES:
                self._image_bytes -= len(self._images.popitem(last=False)[1][1])

    def with_images(self, trajectory: Trajectory, token: int) -> tuple[Trajectory, dict[str, bytes]]:
        """Return an agent's trajectory with its images in place of the numbers that tell them (`content_ids`), and
        their files by digest. `token`: id of an image's tokens. Raises KeyError for an image that is forgotten."""
        with self._lock:
            known = {number: span for number, (span, _) in self._images.items()}
            turns = tuple(with_spans(turn, known, token) for turn in trajectory.turns)
            digests = {image.digest for turn in turns for image in turn.images}
            files = {digest: self._images[content_number(digest)][1] for digest in digests}
        return replace(trajectory, turns=turns), files

    def weight_versions(self, fingerprints: Sequence[str]) -> list[Spans | None]:
        """Return the weight versions of each completion; None for tokens that were not generated here."""
        with self._lock:
            entries = [self._generated.get(fingerprint) for fingerprint in fingerprints]
        return [known and known[0] for known in entries]

    def answered(self, fingerprint: str, messages: Sequence[Any]) -> bool:
        """Return whether a completion answered these messages. One that is not remembered may have."""
        with self._lock:
            known = self._generated.get(fingerprint)
        return known is None or known[2] == _told(messages)

    def engine_of(self, fingerprint: str) -> int | None:
        """Return the engine that generated a completion, and so may have it in its prefix cache."""
        with self._lock:
            known = self._generated.get(fingerprint)
        return known and known[1]


class Endpoint:
    """Listens from its construction until `close`.

    A request goes to the engine that generated its last turn, or to the engine with the fewest pending requests. If the
    engine dies, another one takes the request. While no engine is reachable but one is being restarted, requests wait.
    `timeout_s`: limit for one request. `max_requests`: maximum concurrent requests; further ones queue. `reads_calls`:
    the engines have a parser of tool calls. Raises EndpointError if it cannot listen.
    """

    def __init__(
        self,
        engines: ChatEngines,
        *,
        model: str,
        token: str,
        host: str,
        port: int = 0,
        seed: int = 0,
        timeout_s: float = 3600.0,
        max_requests: int = 64,
        reads_calls: bool = False,
    ) -> None:
        self._engines, self._model, self._token, self._reads_calls = engines, model, token, reads_calls
        self._timeout_s = timeout_s
        self.record, self._sessions = ChatRecord(seed), ChatSessions()
        self._pending = [0] * len(engines.workers)
        self._lock = threading.Lock()
        self._warned: set[str] = set()  # at most MAX_WARNINGS
        self._silent: set[asyncio.BaseProtocol] = set()  # connections that have not sent a request yet
        self._pool = ThreadPoolExecutor(max_requests, thread_name_prefix="endpoint")
        self._closed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()
        try:
            self._runner, bound = self._wait(self._start(host, port))
        except OSError as error:
            self._end()
            where = with_port(host, port) if port else f"{host} (any port)"
            raise EndpointError(
                f"the endpoint cannot listen at {where}: {error.strerror or error}; set "
                "policy.generation.vllm_cfg.http_server_host or http_server_port"
            ) from error
        self.address = EndpointAddress(f"http://{with_port(host, bound)}", token, model)

    async def _start(self, host: str, port: int) -> tuple[web.AppRunner, int]:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                *(web.post(path, partial(self._complete, dialect)) for path, dialect in _COMPLETIONS.items()),
                web.post("/v1/messages/count_tokens", self._count_tokens),
                web.post("/tokenize", self._tokenize),
                web.post("/weight_versions", self._weight_versions),
                web.post("/take_session", self._take_session),
            ]
        )
        # A queued request whose client has given up does not begin: clients ask again, and would wait behind it.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await runner.setup()
        try:
            self._server = await self._loop.create_server(partial(self._connect, runner), host, port)
        except OSError:
            await runner.cleanup()
            raise
        return runner, self._server.sockets[0].getsockname()[1]

    def _connect(self, runner: web.AppRunner) -> asyncio.BaseProtocol:
        assert runner.server is not None
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(runner.server.connections) >= min(MAX_CONNECTIONS, descriptors // 2):
            self._warn("too many connections; further ones are closed")
            return _Refused()
        protocol = runner.server()
        self._silent.add(protocol)
        self._loop.call_later(HEADER_S, self._close_if_silent, protocol)
        return protocol

    def _close_if_silent(self, connection: web.RequestHandler) -> None:
        if connection in self._silent:
            self._silent.remove(connection)
            if connection.transport is not None:
                connection.transport.abort()

    async def _stop(self) -> None:
        self._server.close()
        await self._runner.cleanup()

    def close(self) -> None:
        """Stop listening and cut off pending requests. Idempotent."""
        if self._thread.is_alive():
            self._wait(self._stop())
            self._end()

    def _end(self) -> None:
        self._closed.set()  # before the pool: Python waits for its threads when it exits
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT_S)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse requests without the token, and turn HTTP errors into the API's form. Only those with the token may
        keep their connection."""
        self._silent.discard(request.protocol)
        headers = request.headers  # Anthropic's clients send x-api-key
        text = headers.get("Authorization", headers.get("x-api-key", "")).removeprefix("Bearer ")
        token = text.encode(errors="surrogateescape")
        known = hmac.compare_digest(token, self._token.encode())
        if not known and request.path != "/health":
            response: web.StreamResponse = _error(401, "this endpoint asks for its token: Authorization: Bearer ...")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                missing = f"{request.method} {request.path} is not served; POST {', '.join(_COMPLETIONS)} are"
                response = _error(error.status, missing if error.status in (404, 405) else error.reason)
        if not known:
            response.force_close()
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "grpo_mcore"}
        return web.json_response({"object": "list", "data": [model]})

    async def _weight_versions(self, request: web.Request) -> web.Response:
        body = await _json(request)
        names = body.get("fingerprints") if isinstance(body, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return _error(400, "fingerprints: a list of texts is needed")
        return web.json_response({"weight_versions": self.record.weight_versions(names)})

    async def _take_session(self, request: web.Request) -> web.Response:
        body = await _json(request)
        if not isinstance(body, dict) or not isinstance(name := body.get("session"), str):
            return _error(400, "session: a text is needed")
        calls = await self._loop.run_in_executor(self._pool, self._sessions.take, name)
        return web.json_response({"calls": calls})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _json(request)
        if not isinstance(body, dict):
            return _error(400, "the body must be an object")
        reply = await self._loop.run_in_executor(self._pool, self._reply, "tokenize", body)
        return web.json_response(reply.body, status=reply.status)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        reply = await self._ask("tokenize", COUNTED_MESSAGES, await _json(request))
        if reply.status != 200:
            return web.json_response(MESSAGES.error(reply.status, reply.body), status=reply.status)
        return web.json_response({"input_tokens": reply.body["count"]})

    async def _complete(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Answer a request for a completion in the form in which it was asked for."""
        body, name = await _json(request), request.headers.get(SESSION_HEADER)
        reply = await self._ask("complete", dialect, body, self._sessions.open(name) if name else None)
        if reply.status != 200:
            return web.json_response(dialect.error(reply.status, reply.body), status=reply.status)
        answer = dialect.answer(reply.body, body)
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for name, data in dialect.events(answer, body):
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write((f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode())
        await response.write_eof()
        return response

    async def _ask(self, kind: str, dialect: Dialect, body: Any, session: ChatSession | None = None) -> Reply:
        """Return an engine's answer to a request that was asked in a dialect."""
        if not isinstance(body, dict):
            return _no_reply(400, "BadRequestError", "the body must be an object")
        try:
            body = dialect.request(body)
        except DialectError as error:
            return _no_reply(400, "BadRequestError", str(error))
        return await self._loop.run_in_executor(self._pool, self._reply, kind, body, session)

    def _reply(self, kind: str, body: dict[str, Any], session: ChatSession | None = None) -> Reply:
        if kind == "complete" and body.get("tools") and body.get("tool_choice") != "none" and not self._reads_calls:
            self._warn(
                "a request has tools, but calls of them stay text of the answers: set enable_auto_tools and tool_parser"
                " in policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
            )
        seed = self.record.seed(body, self._engines.weight_version) if kind == "complete" else 0
        number, body = session.begin(body) if session else (0, body)
        body = self._without_stale_tokens(body)
        while (index := self._choose(recorded_tokens(body))) is not None:
            engine = self._engines.workers[index]
            try:
                purpose = f"a chat {kind} request"
                stream = remote_stream(engine, Engine.chat, timeout_s=self._timeout_s, purpose=purpose)(
                    kind, body, seed
                )
                reply = next(stream)
                next(stream, None)  # the end of the stream
            except Exception as error:  # any error must reach the client and the log
                self._warn(f"{engine.name} did not answer: {type(error).__name__}: {error}")
                if self._engines.unanswered(engine, error):
                    continue
                return _no_reply(502, type(error).__name__, str(error))
            finally:
                with self._lock:
                    self._pending[index] -= 1
            if reply.fingerprint is not None:
                messages = body.get("messages") or ()
                self.record.note(reply.fingerprint, reply.weight_versions, index, messages)
                if reply.images:
                    files = take_images(read_messages(messages, "messages", inline_image))[1]
                    self.record.note_images(reply.images, files)
                if session is not None and reply.tokens is not None:
                    answer = reply.body["choices"][0]["message"]
                    session.note(number, messages, answer, reply.tokens, reply.weight_versions)
            elif reply.status == 400:
                self._warn(f"a request was refused: {reply.body['error']['message']}")
            return reply
        return _no_reply(503, "NoEngine", "no engine is there now")

    def _without_stale_tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the request without recorded tokens whose prompt was another conversation: an agent has changed or
        dropped messages before that answer, and the tokens would show them as they were."""
        messages = body.get("messages")
        if not isinstance(messages, list):
            return body
        kept = list(messages)
        for position in reversed(range(len(messages))):
            tokens = _recorded(messages[position])
            if tokens is None:
                continue
            if self.record.answered(fingerprint(tokens), messages[:position]):
                break
            kept[position] = {name: value for name, value in messages[position].items() if name not in TOKEN_FIELDS}
            self._warn(
                "a conversation came back with other messages before an earlier answer: it is tokenised again from "
                "there on, as another branch of its sample"
            )
        return {**body, "messages": kept}

    def _choose(self, before: list[int] | None) -> int | None:
        """Choose an engine for a request that continues the tokens `before`, and count the request as pending there.
        Return None if no engine is reachable or being restarted."""
        known = self.record.engine_of(fingerprint(before)) if before and len(self._pending) > 1 else None
        deadline = time.monotonic() + self._timeout_s
        while not (open_now := self._engines.reachable()):
            if not self._engines.returning or time.monotonic() > deadline:
                return None
            if self._closed.wait(POLL_S):
                return None
        with self._lock:
            index = min(open_now, key=self._pending.__getitem__)
            if known in open_now and self._pending[known] <= self._pending[index] + MAX_EXTRA_PENDING:
                index = known
            self._pending[index] += 1
        return index

    def _warn(self, text: str) -> None:
        """Log each text once, up to LONGEST_WARNING characters, and at most MAX_WARNINGS of them."""
        text = text if len(text) <= LONGEST_WARNING else f"{text[:LONGEST_WARNING]} ..."
        with self._lock:
            new = text not in self._warned and len(self._warned) < MAX_WARNINGS
            if new:
                self._warned.add(text)
            last = new and len(self._warned) == MAX_WARNINGS
        if new:
            log.warning("endpoint: %s%s", text, "; further warnings are left out" if last else "")


def _no_reply(status: int, kind: str, reason: str) -> Reply:
    return Reply(status, {"error": {"message": reason, "type": kind, "code": status}})


def recorded_tokens(body: Mapping[str, Any]) -> list[int] | None:
    """Return the tokens of prompt and answer that are recorded in the conversation's last answer."""
    messages = body.get("messages")
    tokens = map(_recorded, reversed(messages if isinstance(messages, list) else []))
    return next((token for token in tokens if token is not None), None)


def _recorded(message: Any) -> list[int] | None:
    parts = [message.get(name) for name in TOKEN_FIELDS[:2]] if isinstance(message, dict) else [None]
    if all(
        isinstance(part, list) and all(type(i) is int and FIRST_CONTENT <= i < 2**63 for i in part) for part in parts
    ):
        return [i for part in parts if part is not None for i in part]
    return None


def _told(messages: Sequence[Any]) -> bytes:
    """Return a hash of what others than the policy say in messages. Its own come back in other forms, such as without
    their thoughts; their tokens count."""

    def text(content: Any) -> Any:
        parts = content if isinstance(content, list) else [content]
        return [(part.get("text") or image_of_part(part) if isinstance(part, dict) else part) or "" for part in parts]

    texts = [
        (message.get("role"), None if message.get("role") == "assistant" else text(message.get("content")))
        for message in messages
        if isinstance(message, dict)
    ]
    return blake2b(json.dumps(texts).encode(), digest_size=16).digest()


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: Any) -> None:
        transport.abort()


async def _json(request: web.Request) -> Any:
    """Return the body of a request, parsed in a thread: a large one would hold up all other requests."""
    try:
        async with asyncio.timeout(BODY_S):
            text = await request.read()
        return await asyncio.to_thread(_parsed, text)
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(reason=f"the body did not come within {BODY_S:g} s") from error
    except (ValueError, RecursionError) as error:
        raise web.HTTPBadRequest(reason=f"the body is not JSON: {str(error).splitlines()[0]}") from error


def _parsed(text: bytes) -> Any:
    """Return what JSON describes. Raises ValueError, RecursionError; HTTPBadRequest if it is nested too deeply."""
    body = json.loads(text)
    level = [body]
    for _ in range(MAX_NESTING):
        inner = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in inner if isinstance(child, dict | list)] if isinstance(body, dict | list) else []
        if not level:
            if b"\\u" in text and has_surrogates(body):
                raise web.HTTPBadRequest(reason="a text in the body is no Unicode: it has half a surrogate pair")
            return body
    raise web.HTTPBadRequest(reason=f"the body is nested deeper than {MAX_NESTING} levels")


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "Unauthorized" if status == 401 else "BadRequestError"}}
    return web.json_response(body, status=status)
