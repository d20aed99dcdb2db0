"""Bytes that the forward of the target and the training of the drafter need beside weights.

Each count follows from what the code keeps, tensor by tensor; tests hold it against the storages
that are really alive on a CPU. Kernels of a GPU keep no more; its fused norms keep less, which is
left as a reserve.
"""

from typing import NamedTuple

from dflash_lightning.budget.setup import BatchLoad, Setup
from dflash_lightning.budget.sizes import TargetSizes, key_width, layer_matrices, query_width
from dflash_lightning.drafter.config import DrafterSpec
from dflash_lightning.drafter.flex import TILE, room_for

LINEAR_CHUNK = 64  # tokens of a chunk of the gated delta rule in transformers
LINEAR_WIDE = 11  # float32 tensors of a head's width alive at its peak, counted on CPU
LINEAR_SQUARE = 2.5  # float32 chunk x chunk matrices alive at the same moment
CONTEXT_WIDE = 3  # gradients of the fused context's width in flight at the end, counted on CPU


def target_peak(
    target: TargetSizes, layer_ids: tuple[int, ...], tokens: int, size: int, *, whole: bool = False
) -> int:
    """Bytes of the target's forward at its worst moment, the kept features included.

    Args:
        target: The target.
        layer_ids: Decoder layers that are read.
        tokens: Padded tokens.
        size: Bytes of a number of the target.
        whole: Whether the layers above the last of them run too.
    """
    kept = len(layer_ids) * target.hidden_size * size
    read = set(target.layer_types if whole else target.layer_types[: max(layer_ids) + 1])
    layer = max(
        _feed_forward(target, size),
        *(_mixer(target, kind, size) for kind in read),
    )
    # while the features are concatenated, they are there twice
    return int(tokens * max(kept + layer, 2 * kept + (1 + whole) * target.hidden_size * size))


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


class Moment(NamedTuple):
    """What the drafter's training holds at one moment, in bytes.

    Args:
        name: ``forward``, ``head``, ``backward`` or ``context``: the end of the drafter's forward
            pass, the head, the last layer's backward pass, and that of the context.
        context: Of the fused context.
        blocks: Of the block tokens.
        casts: Copies of matrices in bfloat16.
        passing: What goes away within the moment.
    """

    name: str
    context: int
    blocks: int
    casts: int
    passing: int


def moments(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> list[Moment]:
    """The moments of which one is the worst, whatever the sizes.

    Args:
        spec: The drafter.
        load: The batch.
        setup: How the run trains.
    """
    again = setup.activation_checkpointing
    kept = context_bytes(spec, load.tokens, setup)
    keys = spec.num_layers * 2 * setup.compute_bytes * key_width(spec) * load.tokens
    blocks, held = block_bytes(spec, load, setup), kept + keys * again
    casts = cast_bytes(spec, setup)
    fusion = matrix_bytes(len(spec.target_layer_ids) * spec.hidden_size**2, setup)
    fused = CONTEXT_WIDE * setup.compute_bytes * spec.hidden_size * load.tokens
    teacher = teacher_bytes(spec, load, setup)
    # gate, up and their product of the last layer, where none of it is kept
    once = 3 * setup.compute_bytes * spec.intermediate_size * load.slots * spec.block_size
    return [
        Moment("forward", kept + keys, blocks, casts.forward, teacher + again * once),
        Moment("head", held, blocks, casts.forward, teacher + head_bytes(spec, load, setup)),
        Moment(
            "backward",
            held,
            blocks + again * _recomputed(spec, load, setup),
            casts.backward,
            backward_bytes(spec, load, setup),
        ),
        Moment("context", kept + keys, 0, casts.context, max(fused, fusion)),
    ]


def context_bytes(spec: DrafterSpec, tokens: int, setup: Setup) -> int:
    """Bytes kept of the context: fused features, and keys of every layer around their norm.

    Args:
        spec: The drafter.
        tokens: Padded tokens.
        setup: How the run trains.
    """
    size = setup.compute_bytes
    fused = (8 + size) * spec.hidden_size  # before, inside and after the norm
    features = len(spec.target_layer_ids) * spec.hidden_size
    cast = size * features if setup.target_bytes != size else 0  # a copy is kept
    return tokens * (cast + fused + spec.num_layers * 8 * key_width(spec))


class Packing(NamedTuple):
    """What the kernel of one layer works on.

    Args:
        queries: Block tokens.
        keys: Context and block tokens, each copy counted.
    """

    queries: int
    keys: int


def packing(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> Packing:
    """Queries and keys that a layer copies for its kernel.

    Args:
        spec: The drafter.
        load: The batch.
        setup: How the run trains.
    """
    blocks = load.slots * spec.block_size
    if setup.attention == "flex":
        room = room_for(load.tokens, blocks)
        return Packing(room.slots, sum(room))
    # every chunk copies the context it sees next to its own keys and values
    seen = int(load.rows * load.chunks * load.visible)
    copies = spec.num_attention_heads // spec.num_key_value_heads if setup.on_gpu else 1
    return Packing(blocks, copies * (seen + blocks))


def layer_bytes(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> int:
    """Bytes that one draft layer keeps for its backward pass, without its input and context."""
    size, packed = setup.compute_bytes, packing(spec, load, setup)
    # float32: input, normalised, twice; in bf16 each of five products casts its own input
    width = (26 if size == 2 else 24) * spec.hidden_size
    around = (8 + size) * query_width(spec) + 8 * key_width(spec)  # norms of heads, output
    slot = width + 4 * size * spec.intermediate_size + around + size * spec.head_dim
    query = 2 * size * query_width(spec) + 4 * spec.num_attention_heads
    keys = 2 * size * key_width(spec) * packed.keys
    return load.slots * spec.block_size * slot + packed.queries * query + keys


def block_bytes(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> int:
    """Bytes kept of all blocks from forward to backward: all layers, or each layer's output."""
    blocks = load.slots * spec.block_size
    start = blocks * spec.hidden_size * (6 if setup.compute_bytes == 2 else 4)  # embeddings
    if setup.activation_checkpointing:
        return start + blocks * spec.hidden_size * 4 * spec.num_layers
    return start + spec.num_layers * layer_bytes(spec, load, setup)


def _recomputed(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> int:
    """Bytes of the last layer once it is computed again, beside all outputs.

    Its own output is not made again, and the first one is gone with the output norm.
    """
    outputs = 2 * 4 * spec.hidden_size * load.slots * spec.block_size
    return layer_bytes(spec, load, setup) - outputs


def backward_bytes(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> int:
    """Bytes of gradients in flight in the feed-forward part: two of states, or one and a matrix."""
    blocks = load.slots * spec.block_size
    states = setup.compute_bytes * spec.intermediate_size * blocks
    matrix = matrix_bytes(spec.intermediate_size * spec.hidden_size, setup)
    return 4 * spec.hidden_size * blocks + states + max(states, matrix)


def matrix_bytes(weights: int, setup: Setup) -> int:
    """Bytes of a matrix's gradient before it is added to the others: as computed, and float32."""
    return weights * (4 if setup.compute_bytes == 4 else 6)


def head_bytes(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> int:
    """Bytes around the head, its buffers aside: output norm, states of labels, their gradient."""
    normed = 8 * load.slots * spec.block_size
    return spec.hidden_size * (normed + (4 + setup.target_bytes) * labels_of(spec, load))


def teacher_bytes(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> int:
    """Bytes of the target's states that predict the labels, where the goal needs them."""
    needed = setup.goal != "ce"
    return needed * setup.target_bytes * spec.hidden_size * labels_of(spec, load)


def labels_of(spec: DrafterSpec, load: BatchLoad) -> int:
    """Labelled block tokens at most: all but the anchors."""
    return load.slots * (spec.block_size - 1)


def mask_bytes(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> int:
    """Bytes of the masks of all layer types.

    Additive ones of all chunks for sdpa. For flex four lists of tiles, those that are seen whole
    and in part by queries and by keys, and four edges a query, all int32.
    """
    kinds = len(set(spec.layer_types))
    if setup.attention == "flex":
        packed = packing(spec, load, setup)
        tiles = packed.queries * packed.keys // TILE**2
        return kinds * 4 * 4 * (tiles + packed.queries)
    return int(_cells(spec, load) * setup.compute_bytes * kinds)


def score_bytes(spec: DrafterSpec, load: BatchLoad) -> int:
    """Bytes of attention weights that a kernel which is not fused would keep, per layer."""
    return int(_cells(spec, load) * 4 * spec.num_attention_heads)


def _cells(spec: DrafterSpec, load: BatchLoad) -> float:
    """Pairs of query and key in all chunks."""
    blocks = load.slots * spec.block_size
    own = -(-blocks // max(load.rows * load.chunks, 1))
    return blocks * (load.visible + own)


class Casts(NamedTuple):
    """Bytes of the bfloat16 copies of matrices that autocast makes.

    All last for the forward pass; those that gradients pass through stay, except in layers that are
    computed again, which make theirs anew.

    Args:
        forward: Until the head is done.
        backward: In the last layer's backward pass.
        context: In that of the context.
    """

    forward: int
    backward: int
    context: int


def cast_bytes(spec: DrafterSpec, setup: Setup) -> Casts:
    """Copies of matrices by moment; none without autocast.

    Args:
        spec: The drafter.
        setup: How the run trains.
    """
    if setup.compute_bytes == 4:
        return Casts(0, 0, 0)
    layer, keys = layer_matrices(spec), spec.num_layers * 2 * spec.hidden_size * key_width(spec)
    layers = spec.num_layers * layer
    fusion = len(spec.target_layer_ids) * spec.hidden_size**2
    again = setup.activation_checkpointing
    return Casts(2 * (fusion + layers), 2 * (keys + layer if again else layers), 2 * keys)
