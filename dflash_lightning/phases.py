"""The phases of a training step, and a clock that tells how long each takes without waiting."""

import time
from typing import Any, Protocol

import torch

# What a step marks, in order, and what it is called; waiting for data has a clock of its own.
PHASES = {
    "target": "target forward",
    "drafter": "drafter forward",
    "head": "head and loss",
    "backward": "backward",
    "optimizer": "optimizer",
}


class Instant(Protocol):
    """A moment of a device's work: now, or when it will have done what it was given up to now."""

    def is_past(self) -> bool:
        """Whether the device has come there; asking waits for nothing."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Seconds between two instants of a kind that are both past."""
        ...


class HostInstant:
    """Now, where the host does the work itself."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def is_past(self) -> bool:
        """Always."""
        return True

    def seconds_since(self, earlier: "HostInstant") -> float:
        """By the host's clock."""
        return self.seconds - earlier.seconds


class CudaInstant:
    """When the current CUDA stream comes to what was queued last."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def is_past(self) -> bool:
        """Whether the stream has come there."""
        return self.event.query()

    def seconds_since(self, earlier: "CudaInstant") -> float:
        """By the device's clock."""
        return earlier.event.elapsed_time(self.event) / 1000


class PhaseClock:
    """Adds up the seconds of each phase of a step on the device that does the work.

    Nothing is waited for: a phase that the device has not finished when the seconds are taken
    counts at the next taking. On CUDA that is the update of the weights, which so stands with the
    step behind its own.

    Marks do nothing until the clock is started, so that steps can be marked at no cost.

    Args:
        instant: ``CudaInstant`` where steps run on a GPU.

    >>> clock = PhaseClock()
    >>> clock.start()
    >>> clock.mark("head")
    >>> clock.stop()
    >>> seconds = clock.take()
    >>> seconds["head"] > 0, seconds["backward"]
    (True, 0.0)
    """

    def __init__(self, instant: type[HostInstant] | type[CudaInstant] = HostInstant) -> None:
        self._instant = instant
        self._is_running = False
        self._current: tuple[str, Instant] | None = None
        self._spans: list[tuple[str, Instant, Instant]] = []

    def start(self) -> None:
        """Heed marks from now on; no phase has begun."""
        self._is_running, self._current = True, None

    def stop(self) -> None:
        """End the current phase and heed no more marks."""
        self.mark(None)
        self._is_running = False

    def mark(self, phase: str | None) -> None:
        """End the current phase; one of ``PHASES`` begins, or None, which is none of them."""
        if not self._is_running:
            return
        now = self._instant()
        if self._current is not None:
            self._spans.append((*self._current, now))
        self._current = None if phase is None else (phase, now)

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last taking, as far as they are past."""
        seconds = dict.fromkeys(PHASES, 0.0)
        ahead = []
        for span in self._spans:
            phase, begin, end = span
            if end.is_past():
                seconds[phase] += end.seconds_since(begin)
            else:
                ahead.append(span)
        self._spans = ahead
        return seconds
