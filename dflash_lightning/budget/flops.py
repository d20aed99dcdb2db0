"""Operations of a training step, and how many a GPU could do."""

from dflash_lightning.budget.sizes import TargetSizes, key_width, layer_matrices, query_width
from dflash_lightning.drafter.config import DrafterSpec
from dflash_lightning.functional.head import Goal

# Dense bfloat16 tensor peaks with float32 accumulation, in operations a second, by a part of the
# device's name; the first that occurs in it decides, so longer names stand first.
PEAK_FLOPS = {
    "GB200": 2.5e15,  # NVIDIA GB200 NVL72 page: 360 PFLOPS with sparsity / 72 / 2
    "B200": 2.25e15,  # NVIDIA HGX page, HGX B200: 36 PFLOPS with sparsity / 8 / 2
    "H200 NVL": 835.5e12,  # NVIDIA H200 datasheet: 1,671 with sparsity / 2
    "H200": 989.5e12,  # NVIDIA H200 datasheet, SXM: 1,979 with sparsity / 2
    "H100 NVL": 835.5e12,  # NVIDIA H100 datasheet: 1,671 with sparsity / 2
    "H100 PCIe": 756e12,  # NVIDIA H100 datasheet of the PCIe card: 1,513 with sparsity / 2
    "H100": 989.5e12,  # NVIDIA H100 datasheet, SXM: 1,979 with sparsity / 2
    "A100": 312e12,  # NVIDIA A100 datasheet
    "L40S": 362e12,  # NVIDIA L40S datasheet: 733 with sparsity
    "RTX PRO 6000 Blackwell Max-Q": 440e12,  # four times its 110 TFLOPS of float32, as its siblings
    "RTX PRO 6000 Blackwell": 503.8e12,  # NVIDIA RTX Blackwell PRO architecture paper
    "RTX 5090": 209.5e12,  # NVIDIA RTX Blackwell architecture paper: 419 with sparsity
    "RTX 4090": 165.2e12,  # NVIDIA Ada architecture paper: 330.3 with sparsity
}


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak of a GPU in operations a second; None where it is not known.

    Args:
        device_name: As ``torch.cuda.get_device_name()`` says.

    >>> peak_flops("NVIDIA A100-SXM4-80GB"), peak_flops("Quadro 600")
    (312000000000000.0, None)
    """
    name = device_name.casefold()
    return next((peak for part, peak in PEAK_FLOPS.items() if part.casefold() in name), None)


def flops_per_step(
    target: TargetSizes,
    spec: DrafterSpec,
    *,
    tokens: float,
    width: float,
    slots: float,
    labels: float,
    checkpointing: bool = False,
    goal: Goal = "ce",
) -> dict[str, float]:
    """Operations (multiply and add count as two) of a step, over all its batches.

    Args:
        target: The target.
        spec: The drafter.
        tokens: Padded tokens of the step.
        width: Mean padded length of a row, weighted by tokens.
        slots: Anchor slots of the step.
        labels: Labelled block tokens of the step.
        checkpointing: Whether draft layers are computed again in the backward pass.
        goal: What a slot should predict; others than ``ce`` need all layers of the target and its
            logits for every label.

    Returns:
        Operations of ``target``, ``drafter`` and ``head``.
    """
    blocks = slots * spec.block_size
    context = 2 * tokens * spec.hidden_size * 2 * key_width(spec) * spec.num_layers
    fusion = 2 * tokens * len(spec.target_layer_ids) * spec.hidden_size**2
    layers = 2 * blocks * layer_matrices(spec) * spec.num_layers
    layers += sum(
        blocks * _attention(query_width(spec), _visible(kind, width, spec.sliding_window))
        for kind in spec.layer_types
    )
    # gradients of weights and of inputs; those of the frozen features are not needed
    drafter = 2 * fusion + 3 * context + 3 * layers
    if checkpointing:  # nothing is computed again behind the last product's input
        down = 2 * blocks * spec.hidden_size * spec.intermediate_size * spec.num_layers
        drafter += layers - down
    whole = goal != "ce"
    last = len(target.layer_types) - 1 if whole else max(spec.target_layer_ids)
    return {
        "target": tokens * target_flops_per_token(target, last, width),
        "drafter": drafter,
        "head": labels * (2 + whole) * 2 * spec.hidden_size * target.vocab_size,
    }


def target_flops_per_token(target: TargetSizes, last: int, width: float) -> float:
    """Operations of the target's forward on one token, up to layer ``last``."""
    work = 2.0 * sum(target.layer_parameters[: last + 1])
    for kind in target.layer_types[: last + 1]:
        if kind == "linear_attention":
            # reading, correcting and writing a head's state
            work += 6 * target.linear_heads * target.linear_head_dim**2
        else:
            work += _attention(target.query_width, _visible(kind, width, target.sliding_window))
    return work


def _visible(kind: str, width: float, window: int | None) -> float:
    """Mean tokens that a token sees in a row of this width."""
    return min(width / 2, window) if kind == "sliding_attention" and window else width / 2


def _attention(queries: int, visible: float) -> float:
    """Operations of one token's scores and weighted sum."""
    return 2 * 2 * queries * visible
