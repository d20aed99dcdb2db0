"""Regressors of the bucket losses: trend, edges, offsets of the buckets, lengths inside them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dflash_lightning.diagnosis.pool import Steps
from dflash_lightning.diagnosis.run import Floats
from dflash_lightning.diagnosis.spline import clock, spline_basis

MOST_EDGES = 20  # more share one coefficient: each of them would take few steps to itself
CLEARANCE = 8  # steps that an edge needs on either side
POWERS = (1, 2, 3)  # of the length inside a bucket, the highest of them


class Form(NamedTuple):
    """Which regressors a design has.

    Args:
        drift: Whether offsets drift.
        own: Whether each bucket has coefficients of length of its own.
        degree: Highest power of the length.
    """

    drift: bool
    own: bool
    degree: int


@dataclass(frozen=True, eq=False)
class Design:
    """Regressors of the bucket losses, in the order of the ``P`` coefficients.

    Those of offsets and lengths are kept by what they are made of: as a matrix of ``[T * K, P]``
    they would be zero nearly everywhere.

    Args:
        common: Regressors that all buckets of a step share, float64 ``[T, a]``: the trend, then
            the edges, then what was added.
        contrast: A basis of the offsets, float64 ``[K, K - 1]``.
        clocks: What multiplies the contrasts, float64 ``[T, c]``: 1, and x where offsets drift.
        bent: Powers of the length inside each bucket, float64 ``[T, K, d]``.
        slopes: Which coefficients of them a bucket has: ones ``[K, 1]`` where all buckets share
            them, else the identity, float64 ``[K, s]``.
        edges: Columns of ``common`` that are edges.
        edges_at: Positions of these edges.
        extra: Columns of ``common`` that were added.
    """

    common: Floats
    contrast: Floats
    clocks: Floats
    bent: Floats
    slopes: Floats
    edges: slice
    edges_at: tuple[int, ...]
    extra: slice

    @property
    def offsets(self) -> slice:
        """Coefficients that make ``b_k(t)``."""
        first = self.common.shape[1]
        return slice(first, first + self.clocks.shape[1] * self.contrast.shape[1])

    def mixed_offsets(self, portion: Floats) -> Floats:
        """Regressors of a mixture's offset alone, by portions ``[T, K]``: ``[T, c (K - 1)]``."""
        mixed = portion @ self.contrast
        return np.hstack([clock[:, None] * mixed for clock in self.clocks.T])

    def mixed(self, portion: Floats) -> Floats:
        """Regressors of a mixture of buckets, by portions ``[T, K]``: float64 ``[T, P]``."""
        return np.hstack([self.common, self.mixed_offsets(portion), self.mixed_lengths(portion)])

    def shortened(self, form: Form) -> "Design":
        """The regressors of a form, which must be no more."""
        return replace(
            self,
            clocks=self.clocks[:, : 1 + form.drift],
            bent=self.bent[:, :, : form.degree],
            slopes=self.slopes if form.own else self.slopes.sum(1, keepdims=True),
        )

    def columns(self, form: Form) -> Floats:
        """How the regressors of a form are made of these, float64 ``[P, p]``."""
        num_own, degree = self.slopes.shape[1], self.bent.shape[2]
        kept = self.common.shape[1] + (1 + form.drift) * self.contrast.shape[1]
        shared = np.eye(num_own) if form.own else np.ones((num_own, 1))
        lengths = np.kron(shared, np.eye(degree)[:, : form.degree])
        columns = np.zeros((self.offsets.stop + len(lengths), kept + lengths.shape[1]))
        columns[:kept, :kept] = np.eye(kept)
        columns[self.offsets.stop :, kept:] = lengths
        return columns

    def mixed_lengths(self, portion: Floats) -> Floats:
        """Regressors of a mixture's lengths alone, by portions ``[T, K]``: ``[T, s d]``."""
        mixed = np.einsum("tkd,ks->tsd", portion[:, :, None] * self.bent, self.slopes)
        return mixed.reshape(len(portion), -1)


def all_regressors(steps: Steps, knots: Floats, extra: Floats | None) -> Design:
    """All regressors that may be needed."""
    time = clock(steps.step)
    trend = spline_basis(np.clip(time, knots[0], knots[-1]), knots)
    edges_at = told_apart(steps.edges, len(time))
    edges = edge_regressors(edges_at, len(time))
    parts = [trend, edges, np.empty((len(time), 0)) if extra is None else extra]
    ends = np.cumsum([part.shape[1] for part in parts])
    x = 2 * (time - time[0]) / max(time[-1] - time[0], 1e-12) - 1
    bent = [_bent(steps, power) for power in POWERS if steps.has_length]
    return Design(
        common=np.hstack(parts),
        contrast=_contrasts(steps.share),
        clocks=np.stack([np.ones(len(time)), x], axis=1),
        bent=np.stack(bent, axis=2) if bent else np.empty((*steps.precision.shape, 0)),
        slopes=np.eye(steps.num_buckets),
        edges=slice(ends[0], ends[1]),
        edges_at=edges_at,
        extra=slice(ends[1], ends[2]),
    )


def _bent(steps: Steps, power: int) -> Floats:
    """A power of the inner length of each bucket, around its mean: float64 ``[T, K]``."""
    values = steps.inner_length**power
    weights = steps.precision
    mean = (weights * values).sum(0) / np.maximum(weights.sum(0), 1e-300)
    known = steps.inner_length != 0
    return np.where(known, values - mean, 0.0)


def told_apart(edges: Sequence[int], length: int) -> tuple[int, ...]:
    """Edges with enough steps on either side; of two too close, the first stands for both."""
    apart: list[int] = []
    for edge in edges:
        if CLEARANCE <= edge <= length - CLEARANCE and edge - CLEARANCE >= (apart or [0])[-1]:
            apart.append(edge)
    return tuple(apart)


def edge_regressors(edges: Sequence[int], length: int) -> Floats:
    """One step up at each edge; where there are many, one staircase: float64 ``[T, J]``."""
    up = (np.arange(length)[:, None] >= np.array(edges, np.int64)).astype(np.float64)
    return up.sum(1, keepdims=True) if len(edges) > MOST_EDGES else up


def _contrasts(share: Floats) -> Floats:
    """A basis of the offsets whose sum under the shares is zero: float64 ``[K, K - 1]``."""
    return np.linalg.svd(share[None])[2][1:].T
