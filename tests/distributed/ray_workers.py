"""Workers for the tests of the Ray cluster."""

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_mcore.cluster import ObjectStore, Parcel, Rendezvous


def wait_at(gate: str) -> None:
    """Wait until the file exists."""
    while not Path(gate).exists():
        time.sleep(0.005)


@dataclass
class Fatal:
    """Ends the process that sends it, or cannot be sent (`how` "fails")."""

    how: str

    def __reduce__(self) -> str:
        if self.how == "fails":
            raise TypeError("cannot be sent")
        time.sleep(0.2)  # what was sent before has arrived
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


@dataclass(frozen=True)
class Record:
    """A small object that refers to a large one."""

    size: int
    ref: object


class Abacus:
    """A worker."""

    def __init__(self, start: int = 0, store: ObjectStore | None = None, gate: str | None = None) -> None:
        if gate is not None:
            wait_at(gate)
        self.total = start
        self.store = store

    def add(self, value: int) -> int:
        self.total += value
        return self.total

    def sum_of(self, first: list[int], more: int, *others: list[int]) -> int:
        return sum(first) + more + sum(map(sum, others))

    def sum_fetched(self, records: list[Record]) -> int:
        assert self.store is not None
        return sum(sum(values) for values in self.store.fetch_many([record.ref for record in records]))

    def count(self, upto: int) -> Iterator[int]:
        yield from range(upto)

    def count_behind(self, upto: int, gate: str) -> Iterator[int]:
        """Yield 0, then wait for the file `gate` before each further item."""
        for value in range(upto):
            yield value
            wait_at(gate)

    def lists(self, sizes: list[int]) -> Iterator[Parcel]:
        for size in sizes:
            yield Parcel(size, list(range(size)))

    def lists_together(self, sizes: list[int], gate: str | None = None) -> Iterator[list[Parcel]]:
        """Yield each list in two halves, at once or, with `gate`, behind that file; then fail if the last size is 0."""
        for size in sizes:
            if not size:
                raise KeyError("beads")
            yield [Parcel((size, half), list(range(half, size, 2))) for half in range(2)]
            if gate is not None:
                wait_at(gate)

    def last_parcel_is_fatal(self, part: str, how: str) -> Iterator[Parcel]:
        """Yield a list, then a parcel that cannot be sent whole. `part`: "label" or "content"."""
        yield Parcel(3, [0, 1, 2])
        yield Parcel(**{"label": 4, "content": [0, 1, 2, 3]} | {part: Fatal(how)})

    def stored_list(self, size: int) -> Record:
        assert self.store is not None
        return Record(size, self.store.put(list(range(size))))

    def put_in_stream(self) -> Iterator[Record]:
        yield self.stored_list(3)

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def kernel_environment(self) -> str:
        return Path("/proc/self/environ").read_bytes().replace(b"\0", b"\n").decode()

    def fail(self, text: str) -> None:
        logging.getLogger("grpo_mcore.abacus").info("about to fail")
        raise ValueError(text)

    def fail_unpicklably(self) -> None:
        class Awkward(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__("awkward")

        raise Awkward(1, 2)

    def die(self) -> None:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def nap_in_the_middle(self, gate: str) -> str:
        wait_at(gate)
        return "awake"


class Rank:
    """A worker of a group."""

    def __init__(self, rendezvous: Rendezvous, word: str) -> None:
        self.rendezvous, self.word = rendezvous, word

    def facts(self) -> tuple[Rendezvous, str]:
        return self.rendezvous, self.word

    def meet(self) -> int:
        """Return the rank of the other one of two, which comes to the group's meeting point, as torch's would."""
        there = self.rendezvous.master_addr, self.rendezvous.master_port
        if self.rendezvous.rank == 0:
            with socket.create_server(there) as server:
                server.settimeout(30)
                connection, _ = server.accept()
        else:
            deadline = time.monotonic() + 30
            while True:
                try:
                    connection = socket.create_connection(there)
                    break
                except ConnectionRefusedError:  # rank 0 is not there yet
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
        with connection:
            connection.sendall(bytes([self.rendezvous.rank]))
            return connection.recv(1)[0]

    def act(self, failing_rank: int, gate: str | None = None) -> int:
        if self.rendezvous.rank == failing_rank:
            raise RuntimeError(f"rank {failing_rank} has had enough")
        if gate is not None:
            wait_at(gate)
        return self.rendezvous.rank


class BadStart:
    def __init__(self) -> None:
        raise FileNotFoundError("no beads")

    def add(self, value: int) -> int:
        return value
