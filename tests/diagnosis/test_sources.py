"""Sources: found where steps follow what they drew, and not invented."""

import re
from dataclasses import replace

import numpy as np
import pytest
from diagnosis.simulate import simulate

from dflash_lightning.diagnosis import Run, Sources, diagnose

NAMES = ("code", "mail", "story", "rare")


def drawn(run: Run, seed: int) -> Sources:
    """Sources at random, the last one in hardly any row."""
    portion = np.random.default_rng(seed).dirichlet([8, 8, 8, 0.01], len(run))
    return Sources(NAMES, run.step, portion)


def with_effect(run: Run, sources: Sources, nats: list[float]) -> Run:
    """The same run where a source's rows cost more."""
    more = sources.portion @ np.array(nats)
    columns = {**run.columns, "loss": run.loss + more}
    buckets = {**run.buckets, "loss": run.bucket("loss") + more[:, None]}
    return replace(run, columns=columns, buckets=buckets)


@pytest.mark.parametrize("deal", ["stratified", "aligned"])
def test_steps_that_follow_their_sources_are_said_to(deal: str) -> None:
    run, truth = simulate(0, deal=deal)
    sources = drawn(run, 0)
    effect = [-10 * truth.unit, 0.0, 10 * truth.unit, 0.0]
    found = diagnose(with_effect(run, sources, effect), sources=sources)
    (cause,) = (c for c in found.causes if c.cause == "source")
    moved = (sources.portion[run.step >= 100] @ np.array(effect)).var()
    assert cause.share == pytest.approx(moved / found.std**2, rel=0.25)
    low, high = re.search(r"about (\S+) nats in code, (\S+) in story", cause.says).groups()
    # The deviation of an estimate: a step's noise over the root of 500 steps that differ by 0.1.
    error = truth.unit / np.sqrt(500) / 0.1
    assert float(low) == pytest.approx(effect[0], abs=4 * error)
    assert float(high) == pytest.approx(effect[2], abs=4 * error)


def test_sources_that_do_not_matter_are_not_named() -> None:
    for seed in range(40):
        run, _ = simulate(seed, deal="independent", ranks=4)
        found = diagnose(run, sources=drawn(run, seed))
        assert "source" not in [c.cause for c in found.causes]


def test_one_source_cannot_be_compared() -> None:
    run, _ = simulate(1)
    alone = Sources(("all",), run.step, np.ones((len(run), 1)))
    assert diagnose(run, sources=alone).to_dict() == diagnose(run).to_dict()


def test_length_is_not_taken_for_a_source() -> None:
    """A source that lives in the long buckets moves the loss no more than their length does."""
    run, _ = simulate(2, deal="aligned")
    weight = run.bucket("weight")
    long = weight[:, 3:].sum(1) / weight.sum(1)
    sources = Sources(("short", "long"), run.step, np.stack([1 - long, long], axis=1))
    assert "source" not in [c.cause for c in diagnose(run, sources=sources).causes]
