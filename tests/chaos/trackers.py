"""A logger of the user's own whose server is down for a while."""

from collections.abc import Callable, Mapping
from typing import Any


class Flaky:
    """Refuses everything while `is_down()`, and hangs for a moment first."""

    is_down: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, log_dir: Any) -> None:
        self._ask()

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str) -> None:
        self._ask()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._ask()

    def close(self) -> None:
        self._ask()

    def _ask(self) -> None:
        if type(self).is_down():
            raise ConnectionError("503 Service Unavailable")
