"""Measures a plan: everything that its report holds."""

from typing import Any, get_args

import numpy as np

from dflash_lightning.batching.buckets import Floats, Ints, bucket_of
from dflash_lightning.batching.epoch import CLOSED_BY, Batches, deal_steps, random_stream
from dflash_lightning.batching.plan import EpochPlan, plan_epoch
from dflash_lightning.batching.predict import predicted_padding
from dflash_lightning.batching.report import BucketReport, DealReport, PlanReport
from dflash_lightning.batching.settings import Batching, Deal

BUCKET_GAP = 0.1  # nats between the mean losses of neighbouring buckets, for the step's deviation
MOST_WIDTHS = 64
LEAST_FILL = 0.8
MOST_AGAIN = 0.5
MOST_WAITING = 1.25
_COMPARED = 2**32  # part of the random stream that deals for comparison only


def report_plan(plan: EpochPlan) -> PlanReport:
    """Measure a plan.

    Args:
        plan: Any plan with rows.

    Returns:
        The report.

    Raises:
        ValueError: The plan holds no rows.
    """
    batches = plan.batches.take(np.flatnonzero(plan.batches.sizes))
    if not len(batches):
        raise ValueError(
            "a report needs rows, but this epoch is over: all its rows are delivered. Report the "
            "next epoch."
        )
    longest = batches.longest(plan.lengths)
    widths, sizes = plan.batching.padded(longest), batches.sizes
    padded = widths * sizes
    tokens = np.add.reduceat(plan.lengths[batches.rows], batches.offsets[:-1], dtype=np.int64)
    # Of each bucket, or of all rows where batches mix buckets.
    expected = predicted_padding(plan.lengths[batches.rows], plan.batching, plan.boundaries)
    buckets = _bucket_reports(plan, batches, widths, expected)
    total, budget = int(padded.sum()), plan.batching.token_budget
    deals = _deal_reports(plan)
    closed = np.bincount(batches.closed_by, minlength=len(CLOSED_BY)) / len(batches)
    values = {
        "rows": batches.rows.size,
        "batches": len(batches),
        "steps": plan.num_steps,
        "tokens": int(tokens.sum()),
        "padded_tokens": total,
        "efficiency": int(tokens.sum()) / total,
        "fill": total / (budget * len(batches)),
        "closed_by": dict(zip(CLOSED_BY, closed.tolist(), strict=True)),
        "peak": int(padded.max()) / budget,
        "widths": np.unique(widths).size,
        "shapes": np.unique(widths * (sizes.max() + 1) + sizes).size,
        "again": _again(plan, batches),
    }
    return PlanReport(
        **values,
        title=_title(plan, batches),
        predicted=int(tokens.sum()) / float(expected.sum()),
        lag1=_lag1(plan, tokens / sizes),
        deal=plan.batching.deal,
        deals=deals,
        random_step_std=_random_step_std(plan, batches),
        buckets=buckets,
        warnings=_warnings(plan, values, buckets, deals[plan.batching.deal]),
    )


def _title(plan: EpochPlan, batches: Batches) -> str:
    """What was planned, in words."""
    how = plan.batching.order
    if batches.longest_first:
        how = "longest first"
    elif how == "bucketed":
        how = f"{plan.num_buckets} buckets, sort_window={plan.batching.sort_window}"
    rows, count, steps, ranks = (
        f"{number:,} {name}{'es' if name == 'batch' else 's'}" if number > 1 else f"1 {name}"
        for number, name in (
            (batches.rows.size, "row"),
            (len(batches), "batch"),
            (plan.num_steps, "step"),
            (plan.world_size, "rank"),
        )
    )
    if plan.accumulate > 1:
        ranks += f" x {plan.accumulate} accumulated"
    return f"Epoch {plan.epoch}: {rows} in {count}, {steps} on {ranks} ({how})"


def _bucket_reports(
    plan: EpochPlan, batches: Batches, widths: Ints, expected: Floats
) -> tuple[BucketReport, ...]:
    """One report per bucket, given each batch's width and the padded tokens that were predicted."""
    count = plan.num_buckets
    lengths = plan.lengths[batches.rows]
    bucket = bucket_of(lengths, plan.boundaries)
    rows = np.bincount(bucket, minlength=count)
    tokens = np.bincount(bucket, lengths, count)
    padded = np.bincount(bucket, np.repeat(widths, batches.sizes), count)
    led = bucket_of(batches.longest(plan.lengths), plan.boundaries)
    led_batches = np.bincount(led, minlength=count)
    led_rows, led_width = (np.bincount(led, w, count) for w in (batches.sizes, widths))
    expected_share: list[float | None] = [None] * count
    if plan.batching.order == "bucketed":
        expected_share = (tokens / np.maximum(expected, 1)).tolist()
    return tuple(
        BucketReport(
            low=plan.boundaries[k],
            high=plan.boundaries[k + 1],
            rows=int(rows[k]),
            token_share=float(tokens[k] / tokens.sum()),
            batches=int(led_batches[k]),
            batch_rows=float(led_rows[k] / led_batches[k]) if led_batches[k] else None,
            batch_width=float(led_width[k] / led_batches[k]) if led_batches[k] else None,
            mean_length=float(tokens[k] / rows[k]) if rows[k] else None,
            efficiency=float(tokens[k] / padded[k]) if rows[k] else None,
            predicted=expected_share[k] if rows[k] else None,
        )
        for k in range(count)
    )


def _lag1(plan: EpochPlan, mean_length: Floats) -> float:
    """Correlation of the mean lengths of consecutive batches, over all ranks."""
    whole = mean_length.size // plan.places * plan.places
    ranks = mean_length[:whole].reshape(-1, plan.world_size)
    before, after = ranks[:-1].ravel(), ranks[1:].ravel()
    if before.size < 2 or min(before.std(), after.std()) < 1e-9 * mean_length.mean():
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])


def _again(plan: EpochPlan, batches: Batches) -> float:
    """Share of the pairs of batch-mates that share a batch in the next epoch's plan."""
    following = _next_epoch(plan).batches
    later = np.empty(plan.lengths.size, np.int64)
    later[following.rows] = np.repeat(np.arange(len(following)), following.sizes)
    now = np.repeat(np.arange(len(batches)), batches.sizes)
    both = np.unique(now * len(following) + later[batches.rows], return_counts=True)[1]
    pairs = int((batches.sizes * (batches.sizes - 1)).sum())
    return float((both * (both - 1)).sum() / pairs) if pairs else 0.0


def _next_epoch(plan: EpochPlan) -> EpochPlan:
    """The following epoch; on one rank where a restart's layout is too wide for whole epochs."""
    key = {"seed": plan.seed, "epoch": plan.epoch + 1}
    layout = {"world_size": plan.world_size, "accumulate": plan.accumulate}
    try:
        return plan_epoch(plan.lengths, plan.batching, **key, **layout)
    except ValueError:
        if not plan.done:
            raise
        return plan_epoch(plan.lengths, plan.batching, **key)


def _deal_reports(plan: EpochPlan) -> dict[str, DealReport]:
    """The plan's own steps, and the same batches under the other deals (whole steps only)."""
    widths, sizes = plan.batching.padded(plan.longest), plan.batches.sizes
    work = np.stack([widths * sizes, plan.batching.cost(widths) * sizes], axis=1)
    losses = _losses(plan)
    filled = np.flatnonzero(sizes)
    reports = {}
    for deal in get_args(Deal):
        order = np.arange(sizes.size)
        if deal != plan.batching.deal and filled.size >= plan.places > 1:
            stream = random_stream(plan.seed, plan.epoch, part=_COMPARED)
            order = filled[deal_steps(plan.longest[filled], deal, stream, places=plan.places)]
            order = order[: order.size // plan.places * plan.places]
        shape = (-1, plan.accumulate, plan.world_size, 2)
        per_rank = work[order].reshape(shape).sum(1)
        linear, quadratic = (per_rank.max(1) / per_rank.mean(1)).mean(0).tolist()
        loss, tokens = losses[order].reshape(-1, plan.places, 2).sum(1).T
        reports[deal] = DealReport(
            waiting_linear=linear,
            waiting_quadratic=quadratic,
            step_std=float((loss / tokens).std()),
        )
    return reports


def _losses(plan: EpochPlan) -> Floats:
    """Sum over real tokens of the bucket's assumed loss, and real tokens, ``[batches, 2]``."""
    lengths = plan.lengths[plan.batches.rows]
    loss = BUCKET_GAP * bucket_of(lengths, plan.boundaries)
    batch = np.repeat(np.arange(len(plan.batches)), plan.batches.sizes)
    sums = [np.bincount(batch, w, len(plan.batches)) for w in (lengths * loss, lengths)]
    return np.stack(sums, axis=1, dtype=np.float64)


def _random_step_std(plan: EpochPlan, batches: Batches) -> float:
    """Deviation of a ratio of sums over as many rows as a step has, drawn at random.

    The usual first-order variance of a ratio: Cochran, Sampling Techniques (1977), section 2.11.
    """
    lengths = plan.lengths[batches.rows].astype(np.float64)
    loss = BUCKET_GAP * bucket_of(plan.lengths[batches.rows], plan.boundaries)
    mean = (lengths * loss).sum() / lengths.sum()
    rows = lengths.size / plan.num_steps
    return float(np.sqrt(np.mean((lengths * (loss - mean)) ** 2) / rows) / lengths.mean())


def _warnings(
    plan: EpochPlan, values: dict[str, Any], buckets: tuple[BucketReport, ...], deal: DealReport
) -> tuple[str, ...]:
    """What looks wrong, each with its remedy."""
    found = []
    batching = plan.batching
    limit = max(CLOSED_BY, key=values["closed_by"].get)
    if plan.batches.longest_first:
        found.append(
            f"rows are too few for {plan.places} batches a step: they are batched longest first, "
            "alike in every epoch; lower world_size or accumulate, or add rows."
        )
    if values["fill"] < LEAST_FILL:
        found.append(
            f"fill {values['fill']:.2f}: {values['closed_by'][limit]:.0%} of the batches were "
            f"closed by {limit}; {_fill_remedy(limit, batching)}."
        )
    if batching.order == "bucketed" and not plan.done:
        batches = 1 / batching.most_rows(batching.padded(plan.lengths))
        bucket = bucket_of(plan.lengths, plan.boundaries)
        found += [
            f"bucket ({b.low}, {b.high}] holds {b.rows} rows, less than one batch: lower "
            "num_buckets, or leave out one of its boundaries."
            for b, count in zip(
                buckets, np.bincount(bucket, batches, plan.num_buckets), strict=True
            )
            if count < 1
        ]
    if values["again"] > MOST_AGAIN and not plan.batches.longest_first:
        remedy = "use order=bucketed" if batching.order == "sorted" else "lower num_buckets"
        found.append(
            f"again {values['again']:.2f}: most rows meet the same batch-mates every epoch; "
            f"{remedy}."
        )
    if deal.waiting_linear > MOST_WAITING:
        remedy = "raise max_rows" if limit == "max_rows" else "lower world_size, or add rows"
        if batching.deal != "aligned":
            remedy = f"use deal=aligned, or {remedy}"
        found.append(
            f"waiting {deal.waiting_linear:.2f}: ranks idle while the slowest works; {remedy}."
        )
    if values["widths"] > MOST_WIDTHS:
        grid = 1 << (-(-int(plan.longest.max()) // MOST_WIDTHS) - 1).bit_length()
        found.append(
            f"{values['widths']:,} widths, {values['shapes']:,} shapes of rows x width: attention "
            f"that is compiled per shape would be compiled for each; for it, pad_to={grid} leaves "
            f"at most {MOST_WIDTHS} widths."
        )
    return tuple(found)


def _fill_remedy(limit: str, batching: Batching) -> str:
    """What to do where most batches were closed early by a limit."""
    if limit == "token_budget" and batching.order == "random":
        return "long and short rows share batches: use order=bucketed"
    return {
        "token_budget": "rows are long for the budget: raise token_budget",
        "max_rows": "raise max_rows, or lower token_budget to what is used",
        "cost_budget": "raise cost_budget, or lower token_budget to what is used",
        "bucket end": "lower num_buckets",
        "split": "lower world_size or accumulate, or add rows",
    }[limit]
