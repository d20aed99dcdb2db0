"""Clocks of a run: how long steps take, how fast tokens go by, how much time is left."""

import math
import time

MEMORY_STEPS = 200  # that the recent rate looks back, about
FIRST_STEPS = 3  # of a process, in which kernels are chosen and workers start


class Rate:
    """Recent real tokens per second, and the time that is left at that rate.

    Tokens and seconds are averaged each for itself, exponentially, and only then divided: so the
    rate is that of the mixture of long and short steps, not the mean of their rates. Nothing of
    earlier processes enters. The first steps count only until others have come.

    Args:
        memory: Steps that it looks back, about.
        first: Steps of a process that do not show its speed.

    >>> rate = Rate()
    >>> for _ in range(5):
    ...     rate.add(tokens=2000, seconds=0.5)
    >>> rate.tokens_per_second, rate.seconds_left(10_000)
    (4000.0, 2.5)
    """

    def __init__(self, memory: int = MEMORY_STEPS, first: int = FIRST_STEPS) -> None:
        self.decay = 1 - 1 / memory
        self.first = first
        self.steps = 0
        self._tokens = self._seconds = 0.0

    def add(self, *, tokens: float, seconds: float) -> None:
        """Add a finished step: real tokens of all ranks, and how long it took."""
        if self.steps == self.first:
            self._tokens = self._seconds = 0.0
        self.steps += 1
        self._tokens = self.decay * self._tokens + tokens
        self._seconds = self.decay * self._seconds + seconds

    @property
    def tokens_per_second(self) -> float:
        """The recent rate; NaN before the first step."""
        return self._tokens / self._seconds if self._seconds > 0 else math.nan

    def seconds_left(self, tokens: float) -> float:
        """Time for so many real tokens; 0 where none are left, NaN while nothing is known."""
        rate = self.tokens_per_second
        if tokens <= 0:
            return 0.0
        return tokens / rate if rate > 0 else math.nan


class Stopwatch:
    """Adds up the time between ``start`` and ``pause``, until it is taken."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Run; nothing where it runs already."""
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        """Stand; nothing where it stands already."""
        if self._since is not None:
            self._sum += time.perf_counter() - self._since
            self._since = None

    def take(self) -> float:
        """Seconds so far; stands at zero afterwards."""
        self.pause()
        taken, self._sum = self._sum, 0.0
        return taken
