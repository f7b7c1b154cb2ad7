"""Engines behind an endpoint that answer with their names, and connections to it."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

from grpo_mcore.generation.chat.engine_chat import Reply
from grpo_mcore.generation.endpoint import Endpoint
from grpo_mcore.rollout.trajectory import fingerprint

HEADERS = {"Authorization": "Bearer secret"}


class Engine:
    """Answers with its name and the seed; holds requests back while `hold` is clear. `body`: of the last request."""

    def __init__(self, name: str) -> None:
        self.name, self.hold, self.asked, self.dead = name, threading.Event(), 0, False
        self.hold.set()
        self.body: Any = None

    def stream(self, method: str, kind: str, body: Any, seed: int, **_: Any) -> Iterator[Reply]:
        assert method == "chat"
        self.asked, self.body = self.asked + 1, body
        assert self.hold.wait(30)
        if self.dead:
            raise EOFError("its process ended")
        if body.get("fails"):
            raise OSError("the engine is gone")
        if kind == "tokenize":
            yield Reply(200, {"tokens": [1]})
            return
        ids = body.get("ids", [1])
        yield Reply(200, {"by": self.name, "seed": seed}, fingerprint(ids), ((3, 0, len(ids)),))


class Engines:
    """Two engines. `gone`: the dead ones; `returning`: one is being restarted."""

    def __init__(self) -> None:
        self.workers = [Engine("engine-0"), Engine("engine-1")]
        self.weight_version, self.gone, self.returning = 0, set[int](), False

    def __getitem__(self, number: int) -> Engine:
        return self.workers[number]

    def reachable(self) -> list[int]:
        return [number for number in range(2) if number not in self.gone]

    def unanswered(self, engine: Any, error: Exception) -> bool:
        if isinstance(error, EOFError):
            self.gone |= {number for number, worker in enumerate(self.workers) if worker is engine}
        return isinstance(error, EOFError)

    def replace(self, number: int) -> None:
        self.workers[number] = Engine(f"engine-{number}")
        self.gone, self.returning = self.gone - {number}, False


def connect(endpoint: Endpoint, said: bytes = b"") -> socket.socket:
    host, port = endpoint.address.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(said)
    return connection
