"""What a diagnosis says: each reason in the form of what you see, means, tells, and should do."""

from collections.abc import Sequence

import numpy as np

from dflash_lightning.diagnosis.chance import TWICE, stratified_mix
from dflash_lightning.diagnosis.result import Cause, Chance, Comparison, Share
from dflash_lightning.diagnosis.run import Run
from dflash_lightning.diagnosis.variance import Decomposition

NOTABLE = 0.2  # share from which a part gets its own reason
STRATIFIED = "batching.deal=stratified"
SORTED = (
    "batches are the same in every epoch. Means: rows train beside the same rows of their "
    "length; where neighbouring steps have one length too, the smoothness is the order's, not the "
    "model's. Tell: buckets STORE says how often batch-mates meet again. Do: "
    "batching.order=bucketed, which pads as little."
)
REMEDIES = {
    "rest": (
        "Means: something moves whole steps on a scale of up to about 50 steps; what is slower "
        "counts as trend. Tell: does grad_norm jump with the loss? diagnose --step N names the "
        "rows of a step that does. Do: lower model.lr by a third, or take more rows a step."
    ),
    "non_finite": (
        "Means: these updates were skipped. Tell: diagnose --step N names their rows; they come "
        "again in each epoch if a row is the cause. Do: remove the rows; else lower model.lr "
        "or train in bf16-mixed instead of 16-mixed."
    ),
    "divergence": (
        "Means: training is losing what it had learned. Tell: grad_norm rises with the loss, in "
        "all buckets alike. Do: go on from an older checkpoint with a lower model.lr; clip "
        "gradients at 1.0."
    ),
    "learning_rate": (
        "Means: the peak rate is too high for these batches. Tell: a run with half the rate has no "
        "such shift. Do: lower model.lr by a third, or double model.warmup_steps."
    ),
    "spread": (
        "Means: other rows or another state of the model in these steps. Tell: diagnose --rows, "
        "and --step N for a step of the stretch. Do: look at these rows' sources; if the rows do "
        "not explain it, lower the rate."
    ),
    "rows": (
        "Means: these rows differ from all others of their length, every time. Tell: diagnose "
        "--step N shows their first words. Do: read them; repair or remove them, and prepare the "
        "data again."
    ),
    "period": (
        "Means: the curve follows the order of the batches, not the model. Tell: the mix-adjusted "
        "curve has no such swing. Do: shuffle the order of batches (order=bucketed)."
    ),
    "epoch_edge": (
        "Means: rows are remembered from one epoch to the next. Tell: val/loss does not take part "
        "in the step. Do: nothing while val/est_tau rises; else more data or fewer epochs."
    ),
    "source": (
        "Means: sources differ in difficulty, and steps in what they draw. Tell: diagnose --step N "
        "names a step's sources. Do: nothing; more rows a step make it smaller."
    ),
    "restart": (
        "Means: the job was stopped and resumed. Tell: no step in the mix-adjusted curve. Do: "
        "nothing."
    ),
}


def facts(run: Run, taken: Decomposition) -> dict[str, str]:
    """A short remark on each share."""
    rest = taken.shares[2]
    interval = f"95 % interval {100 * rest.low:.0f} .. {100 * rest.high:.0f} %"
    if rest.high < 0:
        meaning = "nothing to explain; the rows' spread promises more scatter than there is"
    else:
        meaning = "nothing to explain" if rest.low <= 0 else "more than the rows explain"
    return {
        "mix": _mix_fact(run, taken),
        "noise": _noise_fact(run, taken),
        "rest": f"{interval}: {meaning}",
    }


def _mix_fact(run: Run, taken: Decomposition) -> str:
    steps = taken.steps
    if steps.num_buckets < 2:
        return "one bucket: no mix"
    level = taken.fit.offset[-1] + taken.fit.trend[-1]
    edges = list(run.header.get("boundaries", ()))
    low, high = int(level.argmin()), int(level.argmax())

    def bucket(k: int) -> str:
        number = int(steps.active[k])
        if number + 1 >= len(edges):
            return f"bucket {number}"
        return f"({edges[number]}, {edges[number + 1]}]"

    return (
        f"which buckets a step drew: {level[low]:.2f} in {bucket(low)}, {level[high]:.2f} in "
        f"{bucket(high)}"
    )


def _noise_fact(run: Run, taken: Decomposition) -> str:
    labels, rows = run.column("labels"), run.column("rows")
    known = np.isfinite(labels) & np.isfinite(rows)
    size = ""
    if known.any():
        size = (
            f"about {np.median(labels[known]):,.0f} labels of {np.median(rows[known]):,.0f} rows "
        )
        size += "a step; "
    if taken.confounded:
        return f"{size}noise and rest are one number here"
    return f"{size}what the rows' own spread explains"


def state(run: Run, peak: int | None, *, judged: bool) -> str:
    """Where the run is in its schedule."""
    if not peak or judged:
        return ""
    last = int(run.step[-1])
    rate, top = run.column("lr")[-1], run.header.get("peak_lr")
    of = f", rate {rate:.2g} of {top:.2g}" if np.isfinite(rate) and top else ""
    return f"Warm-up: step {last:,} of {peak:,}{of}; judged again 80 steps after its end."


def does(because: str) -> str:
    """What to do about a cause."""
    words = REMEDIES[because].split("Do: ")[1]
    return words[0].upper() + words[1:]


def remedy(run: Run, taken: Decomposition, because: str, chance: Chance) -> str:
    """The cheapest change.

    Args:
        run: The run.
        taken: Its variance.
        because: What decided the verdict; empty where nothing is wrong.
        chance: Its five numbers.
    """
    if because:
        return does(because)
    if run.header.get("order") == "sorted":
        return "Batches that change every epoch, with as little padding: batching.order=bucketed."
    now, dealt = chance.changes["now"], chance.changes.get(STRATIFIED)
    if dealt is not None and dealt < 0.9 * now:
        return (
            f"Smoother steps without more padding: {STRATIFIED} (predicted standard deviation "
            f"{dealt:.2g})."
        )
    if dealt is None and taken.shares[0].share > NOTABLE and _stratifiable(run):
        return f"Smoother steps without more padding: {STRATIFIED}."
    mix, _, rest = taken.shares
    if taken.confounded:
        return "Nothing that this source can tell speaks against it."
    if rest.low > 0:
        return ""
    by = (
        "length mix and sampling noise explain"
        if mix.share > NOTABLE
        else "sampling noise explains"
    )
    return f"Just randomness: {by} the jumps."


def _stratifiable(run: Run) -> bool:
    """Whether a step has several batches that could be dealt otherwise."""
    places = run.header.get("world_size", 1) * run.header.get("accumulate", 1)
    return places > 1 and run.header.get("deal") != "stratified"


def reasons(
    run: Run,
    taken: Decomposition,
    causes: Sequence[Cause],
    chance: Chance,
    comparison: Comparison | None,
) -> tuple[str, ...]:
    """Sentences, the most serious first."""
    lines = [f"{cause.says}. {REMEDIES[cause.cause]}" for cause in causes]
    if run.header.get("order") == "sorted":
        lines.append(SORTED)
    lines += _share_reasons(run, taken, chance)
    if comparison is not None:
        lines.append(f"Beside the baseline {comparison.says}.")
    return tuple(line[0].upper() + line[1:] for line in lines)


def _share_reasons(run: Run, taken: Decomposition, chance: Chance) -> list[str]:
    mix, noise, rest = taken.shares
    lines = []
    if mix.share > NOTABLE:
        lines.append(
            f"the loss follows the length of the rows that a step drew ({100 * mix.share:.0f} % of "
            "its variance). Means: steps differ in data, not in what was learned. Tell: the "
            "mix-adjusted curve does not jump with them. Do: read the mix-adjusted curve; "
            + _mix_remedy(run, taken)
        )
    if noise.share > NOTABLE and not taken.confounded:
        lines.append(
            f"the loss scatters as its rows do ({100 * noise.share:.0f} % of its variance). Means: "
            f"just randomness of sampling. Tell: {_rest_is(rest)}. Do: nothing, or average "
            f"{_steps(chance.average_adjusted)} to read the curve to +-{chance.delta:.2g}; twice "
            f"the rows a step make the deviation {chance.changes[TWICE]:.2g}."
        )
    if rest.low > 0 and not taken.confounded:
        seen = f"{100 * rest.share:.0f} % of the variance is unexplained"
        lines.append(f"{seen}. {REMEDIES['rest']}")
    elif not taken.confounded:
        lines.append(
            "no more scatter than the rows explain; what is slower than about 50 steps counts as "
            "trend, not as rest."
        )
    return lines


def _rest_is(rest: Share) -> str:
    return "the rest is small" if rest.low <= 0 else "the rest is there beside it"


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _mix_remedy(run: Run, taken: Decomposition) -> str:
    dealt = stratified_mix(taken, run.header)
    if _stratifiable(run) and (dealt is None or dealt < taken.parts[0] / 2):
        return f"smoother steps: {STRATIFIED}."
    if run.header.get("world_size", 1) * run.header.get("accumulate", 1) == 1:
        return "smoother steps: several batches a step (accumulate_grad_batches, more ranks)."
    return "more batches a step make it smaller."
