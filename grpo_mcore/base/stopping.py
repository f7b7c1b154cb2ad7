"""Stop a run on request. SIGUSR1: finish the step, save, and exit. SIGTERM, or SIGHUP when its terminal closes: save
what is trained so far and exit. A second of these, or Ctrl-C: exit in order without saving."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Literal, TypeVar

from grpo_mcore.base.clock import REAL, Clock

T = TypeVar("T")
Handler = Callable[[int, "FrameType | None"], None]


class StopNow(Exception):
    """Ends a wait of the driver that an urgent request interrupts. Raised by `StopRequest.check`, never by a signal."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came before the run had trained anything."""

    exit_code = 128 + signal.SIGTERM


class StopRequest:
    """A request to stop. `reason`: why, None as long as nobody has asked; `at_once`: do not finish the current step.

    A signal only leaves a note here, since it may come between any two instructions: while a sample is being recorded,
    or while a line is printed. The loop reads the note between its commands, and `check` reads it during waits.
    """

    def __init__(self, save_by: float | None = None, clock: Clock = REAL) -> None:
        """`save_by`: unix time after which the run stops by itself."""
        self.at_once = False
        self.stage: Literal["start", "loop", "end"] = "start"
        """Before, in or after the loop that reacts to requests."""
        self._reason: str | None = None
        self._save_by, self._clock = save_by, clock
        self._interruptible: int | None = None  # the thread whose waits may be interrupted
        self._interrupted = False

    @property
    def reason(self) -> str | None:
        self._raise_if_interrupted()
        if self._save_by is not None and self._clock.unix() >= self._save_by:
            self.ask("checkpointing.checkpoint_must_save_by has come")
        return self._reason

    def ask(self, reason: str, *, at_once: bool = False) -> None:
        self._reason = self._reason or reason
        self.at_once = self.at_once or at_once

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Mark the block in which a loop reacts to requests. After it the run only ends its processes."""
        self.stage = "loop"
        try:
            yield
        finally:
            self.stage = "end"

    def interruptible(self, wait: Callable[[], T]) -> T | None:
        """Return what `wait` returns, or None where an urgent request was there before or has interrupted it at one of
        its calls of `check`."""
        if self.at_once:
            return None
        self._interruptible = threading.get_ident()
        try:
            return wait()
        except StopNow:
            return None
        finally:
            self._interruptible = None

    def check(self) -> None:
        """Raise StopNow if an urgent request interrupts this wait, which is part of an interruptible one. To be called
        only where nothing is half done."""
        self._raise_if_interrupted()
        if self.at_once and self._interruptible == threading.get_ident():
            raise StopNow

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt. Where Python drops it, as in a finalizer or a hook of a fork, the loop raises it
        again at its next look at this request."""
        self._interrupted = True
        raise KeyboardInterrupt

    def ended_before_the_loop(self) -> KeyboardInterrupt | None:
        """Return the interruption that a signal has asked for, if it came before the loop."""
        if self.stage != "start":
            return None
        return KeyboardInterrupt() if self._interrupted else Terminated() if self.at_once else None

    def _raise_if_interrupted(self) -> None:
        if self._interrupted and self.stage == "loop":
            raise KeyboardInterrupt


@contextmanager
def on_signal(save_by: float | None = None) -> Iterator[StopRequest]:
    """Let SIGUSR1 ask the run to stop after its step, and Ctrl-C interrupt it. Batch systems send SIGUSR1 before the
    time limit, also to a run that only starts: one that came while the signal was blocked (`supervise`) is heard too.

    Threads other than the main one get no signals; there, only `ask` makes the request.

    Before the loop, an error after a Ctrl-C or SIGTERM is raised as KeyboardInterrupt or Terminated: the signal may
    have ended an import, where Python or a library makes another error of it.
    """
    request = StopRequest(save_by)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _frame: FrameType | None) -> None:
        request.ask("SIGUSR1 asked the run to stop")

    handlers: dict[int, Handler] = {signal.SIGUSR1: note}
    if not is_ignored(signal.SIGINT):
        handlers[signal.SIGINT] = lambda number, _frame: request.interrupt()
    with handled(handlers, unblocked=(signal.SIGUSR1, signal.SIGINT)):
        try:
            yield request
        except Exception as error:
            if (ended := request.ended_before_the_loop()) is None:
                raise
            for note_of_error in getattr(error, "__notes__", ()):
                ended.add_note(note_of_error)
            raise ended from error


@contextmanager
def on_sigterm(request: StopRequest) -> Iterator[None]:
    """Let SIGTERM and SIGHUP ask the run to save and stop at once. Before the loop they raise Terminated, and the
    second time KeyboardInterrupt. SIGHUP stays ignored where it is (nohup). Ray installs a handler of its own for
    SIGTERM when it starts, so enter this block again afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        if request.at_once:
            signal.signal(number, signal.SIG_IGN)
            request.interrupt()
        request.ask(f"{signal.Signals(number).name} asked the run to stop", at_once=True)
        if request.stage == "start":
            raise Terminated

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if n == signal.SIGTERM or not is_ignored(n)]
    with handled(dict.fromkeys(numbers, note)):
        yield


@contextmanager
def handled(handlers: Mapping[int, Handler], unblocked: Iterable[int] = ()) -> Iterator[None]:
    """Install handlers of signals inside the block, in the main thread, and unblock these signals and those of
    `unblocked`: whoever started this process may have blocked them."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*handlers, *unblocked})
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_ignored(number: int) -> bool:
    """Return whether this process was started to ignore the signal, as nohup does."""
    return signal.getsignal(number) is signal.SIG_IGN
