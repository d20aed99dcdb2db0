"""The clock of a step's phases: what counts for which, on a host and on a device that lags."""

import pytest

from dflash_lightning.diagnosis.run import PHASE_COLUMNS
from dflash_lightning.phases import PHASES, HostInstant, PhaseClock


class Device:
    """A device that is told when it does its work; the host may be ahead of it."""

    def __init__(self) -> None:
        self.queued = self.done = 0.0


class LaggingInstant:
    """When the device comes to what was queued last."""

    device = Device()

    def __init__(self) -> None:
        self.seconds = self.device.queued

    def is_past(self) -> bool:
        return self.seconds <= self.device.done

    def seconds_since(self, earlier: "LaggingInstant") -> float:
        assert self.is_past()
        assert earlier.is_past()
        return self.seconds - earlier.seconds


@pytest.fixture
def device() -> Device:
    LaggingInstant.device = Device()
    return LaggingInstant.device


def step(clock: PhaseClock, device: Device, **seconds: float) -> None:
    """A batch that queues so much work in each phase, and a second of none between phases."""
    clock.start()
    for phase, work in seconds.items():
        device.queued += 1
        clock.mark(phase)
        device.queued += work
        clock.mark(None)
    device.queued += 1
    clock.stop()


def test_the_ledger_has_a_column_for_each_phase() -> None:
    assert tuple(f"{phase}_seconds" for phase in PHASES) == PHASE_COLUMNS


def test_batches_of_a_step_add_up_and_what_lies_between_phases_counts_for_none(
    device: Device,
) -> None:
    clock = PhaseClock(LaggingInstant)
    step(clock, device, target=2, drafter=3, head=5, backward=7)
    step(clock, device, target=20, drafter=30, head=50, backward=70, optimizer=11)
    device.done = device.queued
    expected = {"target": 22, "drafter": 33, "head": 55, "backward": 77, "optimizer": 11}
    assert clock.take() == expected
    assert clock.take() == dict.fromkeys(PHASES, 0.0)


def test_a_phase_ends_where_the_next_begins_or_the_batch_ends(device: Device) -> None:
    clock = PhaseClock(LaggingInstant)
    clock.start()
    clock.mark("target")
    device.queued += 2
    clock.mark("drafter")
    device.queued += 3
    clock.stop()
    device.queued += 100
    device.done = device.queued
    assert clock.take() == {**dict.fromkeys(PHASES, 0.0), "target": 2, "drafter": 3}


def test_what_the_device_has_not_done_yet_counts_at_the_next_taking(device: Device) -> None:
    clock = PhaseClock(LaggingInstant)
    step(clock, device, backward=4, optimizer=6)
    device.done = device.queued - 2  # in the midst of the update
    assert clock.take() == {**dict.fromkeys(PHASES, 0.0), "backward": 4}
    step(clock, device, backward=40)
    device.done = device.queued
    assert clock.take() == {**dict.fromkeys(PHASES, 0.0), "backward": 40, "optimizer": 6}


def test_marks_outside_of_batches_count_nothing(device: Device) -> None:
    clock = PhaseClock(LaggingInstant)
    for _ in range(2):
        clock.mark("target")
        device.queued += 5
        clock.mark(None)
        step(clock, device, head=1)
    device.done = device.queued
    assert clock.take() == {**dict.fromkeys(PHASES, 0.0), "head": 2}


def test_the_host_is_always_done_with_its_work() -> None:
    first, second = HostInstant(), HostInstant()
    assert first.is_past()
    assert second.seconds_since(first) >= 0
