"""Slow twin of batches filled with rows drawn at random: from row to row, every chance followed."""

import numpy as np
from batching.plans import fits, rounded
from hypothesis import strategies as st

from dflash_lightning.batching import Batching

SHORT_LISTS = st.lists(st.sampled_from([1, 2, 3, 5, 8, 20, 21, 60]), min_size=1, max_size=40)


def histogram(lengths: list[int], batching: Batching) -> tuple[list[int], list[int]]:
    """Distinct widths, rising, and the rows of each."""
    widths = [rounded(length, batching.pad_to) for length in lengths]
    distinct = sorted(set(widths))
    return distinct, [widths.count(width) for width in distinct]


def batch_by_rows(
    widths: list[int], counts: list[int], batching: Batching, opens: int | None = None
) -> tuple[float, float, list[float]]:
    """Slow twin of a batch of rows drawn at random: follow (rows, longest) from row to row.

    Returns its mean rows, its mean padded tokens, and how likely each width is the one that did not
    fit; its first row is drawn too, or has the width at ``opens``.
    """
    shares = [count / sum(counts) for count in counts]
    states = {opens: 1.0} if opens is not None else dict(enumerate(shares))
    rows, mean_rows, padded, refused = 1, 0.0, 0.0, [0.0] * len(widths)
    while states:
        longer: dict[int, float] = {}
        for longest, chance in states.items():
            for drawn, share in enumerate(shares):
                wider = max(longest, drawn)
                if fits(rows + 1, widths[wider], batching):
                    longer[wider] = longer.get(wider, 0.0) + chance * share
                else:
                    mean_rows += chance * share * rows
                    padded += chance * share * rows * widths[longest]
                    refused[drawn] += chance * share
        states, rows = longer, rows + 1
    return mean_rows, padded, refused


def true_mean_batch(
    widths: list[int], counts: list[int], batching: Batching
) -> tuple[float, float]:
    """Mean rows and padded tokens of a batch where the row that did not fit opens the next one."""
    batches = [batch_by_rows(widths, counts, batching, opens) for opens in range(len(widths))]
    rows, padded, refused = (np.array(part) for part in zip(*batches, strict=True))
    stays = np.vstack([refused.T - np.eye(len(widths)), np.ones(len(widths))])
    first = np.linalg.lstsq(stays, np.append(np.zeros(len(widths)), 1), rcond=None)[0]
    return float(first @ rows), float(first @ padded)
