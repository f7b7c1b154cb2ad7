"""A clock that stands still until a test moves it."""

from grpo_mcore.base.clock import RealClock


class StandingClock(RealClock):
    """`at`: seconds; `slept`: each sleep so far, which takes no longer than it says."""

    def __init__(self, at: float = 0.0) -> None:
        self.at, self.slept = at, list[float]()

    def now(self) -> float:
        return self.at

    unix = now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds
