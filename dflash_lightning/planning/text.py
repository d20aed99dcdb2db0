"""What a run costs, as lines for the terminal, at most 100 columns wide."""

from dflash_lightning.budget import drafter_parameters, peak_flops
from dflash_lightning.planning.report import RunCost
from dflash_lightning.table import Table, wrapped

NO_ROWS = (
    "Steps, hours and operations need row lengths: give --lengths FILE.npy, or run "
    "`dflash-lightning prepare` to make data.store {store!r}."
)
NO_SPEED = "Hours need a speed: give --tokens_per_second, which `fit` shows after some steps."


def cost_text(cost: RunCost) -> str:
    """All of it."""
    parts = [wrapped(_title(cost)), _memory(cost).text(), "\n".join(map(wrapped, _verdict(cost)))]
    run = _run(cost)
    if run:
        parts.append(Table("The run", ("", "", ""), run, align="lrl").text())
    missing = _missing(cost)
    return "\n\n".join([*parts, *(["\n".join(map(wrapped, missing))] if missing else [])])


def _title(cost: RunCost) -> str:
    job = cost.job
    load = job.load(cost.steps.longest if cost.steps else None)
    gpus = "1 GPU" if job.setup.ranks == 1 else f"{job.setup.ranks} GPUs"
    assumed = "" if job.devices_known else " (assumed: trainer.devices counts none)"
    return (
        f"{job.target_path} with {job.target.parameters / 1e9:.2f} B weights, drafter with "
        f"{drafter_parameters(job.spec) / 1e9:.3f} B, on {gpus}{assumed}. Heaviest batch of a GPU: "
        f"{load.tokens:,} padded tokens in rows up to {load.width:,}, {load.slots:,} blocks of "
        f"{job.spec.block_size}."
    )


def _memory(cost: RunCost) -> Table:
    sheet = cost.sheet
    rows = [
        (line.name, *_sizes(line.bytes), line.phase, line.why)
        for line in sheet.lines
    ]  # fmt: skip
    rows += [
        ("always there", *_sizes(sheet.total("always")), "", ""),
        (f"most, {sheet.worst_phase} phase", *_sizes(sheet.total(sheet.worst_phase)), "", ""),
        ("peak", *_sizes(sheet.peak), "", f"of {cost.gpu_memory / 1e9:g} GB"),
    ]
    title = "Memory of one GPU (1 GB = 1e9 bytes, 1 GiB = 2^30 bytes)"
    return Table(title, ("", "GB", "GiB", "when", "how"), rows, align="lrrll")


def _sizes(count: int) -> tuple[str, str]:
    return f"{count / 1e9:,.2f}", f"{count / 2**30:,.2f}"


def _verdict(cost: RunCost) -> list[str]:
    sheet, memory = cost.sheet, cost.gpu_memory
    free = (memory - sheet.peak) / 1e9
    lines = [
        f"It fits: {free:.1f} GB of {memory / 1e9:g} GB stay free."
        if cost.fits
        else f"It does not fit: {-free:.1f} GB over {memory / 1e9:g} GB. Ways out, cheapest first, "
        "and the peak that each alone would give:"
    ]
    if not cost.fits:
        lines += [f"  {peak / 1e9:,.1f} GB  {name}" for name, peak in cost.ways_out()]
    lines.append(
        "Attention is taken as fused; a kernel that is not would hold "
        f"{sheet.unfused / 1e9:,.1f} GB of scores besides."
    )
    if "linear_attention" in cost.job.target.layer_types:
        lines.append(
            "Linear attention is taken as transformers computes it without flash-linear-attention; "
            "with that kernel the target's forward needs less."
        )
    return lines


def _run(cost: RunCost) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    steps, job = cost.steps, cost.job
    if steps is not None and cost.rows is not None:
        mean = sum(steps.epoch_padded) / len(steps.epoch_padded)
        per_step = f"{job.setup.ranks * job.accumulate} batches, "
        rows += [
            ("rows", f"{steps.rows:,}", cost.rows.origin),
            ("tokens an epoch", f"{steps.tokens:,}", f"rows up to {steps.longest:,}"),
            ("padded an epoch", f"{mean:,.0f}", f"efficiency {steps.tokens / mean:.3f}"),
            (
                "steps an epoch",
                _range(steps.epoch_steps),
                f"{len(steps.epoch_steps)} epochs planned",
            ),
            (
                "steps in all",
                f"{steps.total:,}",
                f"{per_step}{steps.tokens_per_step:,.0f} tokens each",
            ),
        ]
    if cost.flops is not None:
        parts = ", ".join(f"{name} {work / 1e15:,.1f}" for name, work in cost.flops.items())
        rows.append(
            ("PFLOP a step", f"{sum(cost.flops.values()) / 1e15:,.1f}", f"at most: {parts}")
        )
    if cost.hours is not None:
        speed = f"at {cost.tokens_per_second:,.0f} tokens/s, validation aside"
        rows.append(("hours", f"{cost.hours:,.1f}", f"{cost.hours / 24:.1f} days {speed}"))
    if cost.mfu is not None and cost.gpu:
        peak = f"of {(peak_flops(cost.gpu) or 0) / 1e12:,.0f} TFLOP/s a GPU, dense bfloat16"
        rows.append(("MFU", f"{cost.mfu:.0%}", peak))
    size = job.checkpoint_bytes / 1e9
    kept = cost.kept_files
    rows.append(
        (
            "disk",
            f"{size * (kept or 1):,.1f} GB",
            f"{kept or 'each'} x {size:.1f} GB, weights and moments",
        )
    )
    return rows


def _range(values: tuple[int, ...]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _missing(cost: RunCost) -> list[str]:
    if cost.steps is None:
        if cost.job.epochs is None and cost.job.max_steps is None:
            return ["trainer.max_epochs or trainer.max_steps must be set for steps and hours."]
        return [NO_ROWS.format(store=cost.job.data.store_path)]
    lines = [] if cost.tokens_per_second else [NO_SPEED]
    if cost.gpu and peak_flops(cost.gpu) is None:
        lines.append(f"The peak of {cost.gpu!r} is not known, so there is no MFU.")
    return lines
