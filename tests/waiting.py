"""How tests wait for what other threads and processes do."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], what: str = "it", seconds: float = 60.0, pause: float = 0.002) -> None:
    """Return once the condition holds, which is looked at every `pause` seconds. Fail after `seconds`: only what hangs
    takes so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s"
        time.sleep(pause)
