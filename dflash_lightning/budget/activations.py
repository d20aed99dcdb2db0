"""Bytes that the forward of the target and the training of the drafter need beside weights.

Each count follows from what the code keeps, tensor by tensor; tests hold it against the storages
that are really alive.
"""

from typing import NamedTuple

from dflash_lightning.budget.sizes import TargetSizes, key_width, layer_matrices, query_width
from dflash_lightning.drafter.config import DrafterSpec

LINEAR_CHUNK = 64  # tokens of a chunk of the gated delta rule in transformers
LINEAR_WIDE = 11  # float32 tensors of a head's width alive at its peak, counted on CPU
LINEAR_SQUARE = 2.5  # float32 chunk x chunk matrices alive at the same moment


class BatchLoad(NamedTuple):
    """The heaviest batch of one GPU.

    Args:
        tokens: Padded tokens.
        rows: Rows.
        slots: Anchor slots of all rows together.
        width: Padded length of a row in tokens.
        chunk_anchors: Anchors of a row that attend together.
    """

    tokens: int
    rows: int
    slots: int
    width: int
    chunk_anchors: int = 16

    @property
    def chunks(self) -> int:
        """Chunks of anchors; all anchors are one when they fill at most one and a half."""
        per_row = -(-self.slots // max(self.rows, 1))
        if 2 * per_row <= 3 * self.chunk_anchors:
            return 1
        return -(-per_row // self.chunk_anchors)

    @property
    def visible(self) -> float:
        """Context tokens of the mean chunk, which sees up to its last of evenly spread anchors."""
        return self.width * (self.chunks + 1) / (2 * self.chunks)


def target_peak(target: TargetSizes, layer_ids: tuple[int, ...], tokens: int, size: int) -> int:
    """Bytes of the target's forward at its worst moment, the kept features included.

    Args:
        target: The target.
        layer_ids: Decoder layers that are read.
        tokens: Padded tokens.
        size: Bytes of a number of the target.
    """
    kept = len(layer_ids) * target.hidden_size * size
    read = set(target.layer_types[: max(layer_ids) + 1])
    layer = max(
        _feed_forward(target, size),
        *(_mixer(target, kind, size) for kind in read),
    )
    # while the features are concatenated, they are there twice
    return int(tokens * max(kept + layer, 2 * kept + target.hidden_size * size))


def _feed_forward(target: TargetSizes, size: int) -> float:
    """Bytes a token: gate, up and their product beside four tensors of the model's width."""
    return size * (3 * target.intermediate_size + 4 * target.hidden_size)


def _mixer(target: TargetSizes, kind: str, size: int) -> float:
    """Bytes a token of the attention of one layer, with a fused kernel where it is softmax."""
    if kind != "linear_attention":
        # the norm of the queries holds three float32 copies beside queries, gate and output
        return size * 2 * target.hidden_size + 15 * target.query_width
    values = target.linear_heads * target.linear_head_dim
    wide = LINEAR_WIDE * 4 * target.linear_head_dim + LINEAR_SQUARE * 4 * LINEAR_CHUNK
    mixed = size * (2 * target.linear_key_width + 2 * values)
    return size * 3 * target.hidden_size + mixed + target.linear_heads * wide


def context_bytes(spec: DrafterSpec, tokens: int, size: int, *, features: int) -> int:
    """Bytes kept of the context: fused features, and keys and values of every draft layer.

    Args:
        spec: The drafter.
        tokens: Padded tokens.
        size: Bytes of a number in matrix products: 2 under bf16-mixed, else 4.
        features: Bytes of a number of the target's features; where it differs, a copy is kept.
    """
    fused = (8 + size) * spec.hidden_size  # before, inside and after the norm
    cast = size * len(spec.target_layer_ids) * spec.hidden_size if features != size else 0
    per_layer = (8 + 2 * size) * key_width(spec)  # keys around their norm; keys and values
    return tokens * (cast + fused + spec.num_layers * per_layer)


def layer_bytes(spec: DrafterSpec, load: BatchLoad, size: int) -> int:
    """Bytes that one draft layer keeps for its backward pass, without its input's context."""
    # float32: input, normalised, twice; in bf16 each of five products casts its own input
    width = (26 if size == 2 else 24) * spec.hidden_size
    queries = (8 + 3 * size) * query_width(spec) + 4 * spec.num_attention_heads
    own = 8 * key_width(spec) + 2 * size * spec.head_dim
    slot = width + 4 * size * spec.intermediate_size + queries + own
    # every chunk copies the context it sees next to its own keys and values
    copied = load.rows * load.chunks * load.visible + load.slots * spec.block_size
    return int(load.slots * spec.block_size * slot + copied * 2 * size * key_width(spec))


def block_bytes(spec: DrafterSpec, load: BatchLoad, size: int, *, checkpointing: bool) -> int:
    """Bytes kept of all blocks between forward and backward, at the worst moment.

    Args:
        spec: The drafter.
        load: The batch.
        size: Bytes of a number in matrix products.
        checkpointing: Whether each layer keeps its input only and is computed again.
    """
    layer = layer_bytes(spec, load, size)
    ends = load.slots * spec.block_size * spec.hidden_size * 16  # embeddings, output norm
    if not checkpointing:
        return spec.num_layers * layer + ends
    inputs = load.slots * spec.block_size * spec.hidden_size * 4 * spec.num_layers
    return layer + inputs + ends


def backward_bytes(spec: DrafterSpec, load: BatchLoad, size: int) -> int:
    """Bytes of gradients in flight while one layer is passed backwards."""
    slot = 4 * spec.hidden_size + 2 * size * spec.intermediate_size
    context = 2 * size * key_width(spec) * load.tokens
    return load.slots * spec.block_size * slot + context


def mask_bytes(spec: DrafterSpec, load: BatchLoad, size: int) -> int:
    """Bytes of the additive masks of all chunks, one per layer type."""
    own = -(-load.slots * spec.block_size // max(load.rows * load.chunks, 1))
    cells = load.slots * spec.block_size * (load.visible + own)
    return int(cells * size * len(set(spec.layer_types)))


def score_bytes(spec: DrafterSpec, load: BatchLoad) -> int:
    """Bytes of attention weights that a kernel which is not fused would keep, per layer."""
    own = -(-load.slots * spec.block_size // max(load.rows * load.chunks, 1))
    cells = load.slots * spec.block_size * (load.visible + own)
    return int(cells * 4 * spec.num_attention_heads)


def cast_bytes(spec: DrafterSpec, load: BatchLoad, size: int, *, checkpointing: bool) -> int:
    """Bytes of the bfloat16 copies of matrices that autocast makes, at the worst moment.

    The copies last for the forward pass; what is computed again makes those of one layer anew.

    Args:
        spec: The drafter.
        load: The batch.
        size: Bytes of a number in matrix products; 4 makes no copies.
        checkpointing: Whether layers are computed again.
    """
    if size == 4:
        return 0
    fusion = len(spec.target_layer_ids) * spec.hidden_size**2
    whole = size * (fusion + spec.num_layers * layer_matrices(spec))
    if not checkpointing:
        return whole
    keys = spec.num_layers * 2 * spec.hidden_size * key_width(spec)
    later = size * (fusion + keys + layer_matrices(spec))
    return max(later, whole - layer_bytes(spec, load, size))
