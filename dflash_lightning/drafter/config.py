"""What a drafter is: a user's dials, and the description that follows from a target."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from transformers import PretrainedConfig

LayerType = Literal["full_attention", "sliding_attention"]

# Reserved ids that the published drafters of these vocabularies use and that no text contains.
KNOWN_MASK_IDS = {151_936: 151_669, 248_320: 248_070}
# Rotary scalings that are implemented, with the fields that each needs.
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """The dials of a drafter; sizes that are not given are the target's.

    Args:
        num_layers: Draft layers.
        block_size: Tokens of a block, anchor included; a drafter proposes ``block_size - 1`` at
            once.
        target_layer_ids: 0-based target layers whose outputs are the context; null spreads one per
            draft layer.
        mask_token_id: Id that fills the unknown slots; null takes the known-safe id of the target's
            vocabulary.
        layer_types: ``full_attention`` or ``sliding_attention`` per draft layer; null is full
            everywhere.
        sliding_window: Context tokens that a sliding layer sees.
        intermediate_size: Width of the feed-forward part.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads.
        head_dim: Width of a head.
    """

    num_layers: int = 5
    block_size: int = 16
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    layer_types: tuple[LayerType, ...] | None = None
    sliding_window: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_layers", 1), ("block_size", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        _check_layers(self.num_layers, self._layer_types, self.sliding_window)

    @property
    def _layer_types(self) -> tuple[LayerType, ...]:
        if self.layer_types is not None:
            return tuple(self.layer_types)
        return ("full_attention",) * self.num_layers

    def for_target(self, target: PretrainedConfig) -> "DrafterSpec":
        """Complete the dials with the target's sizes.

        Raises:
            ValueError: If a dial does not fit this target.
        """
        sizes = target.to_dict()
        heads = self.num_attention_heads or sizes["num_attention_heads"]
        rope_theta, rope_scaling = read_rope(sizes)
        return DrafterSpec(
            num_layers=self.num_layers,
            block_size=self.block_size,
            target_layer_ids=default_layer_ids(self.num_layers, sizes["num_hidden_layers"])
            if self.target_layer_ids is None
            else tuple(self.target_layer_ids),
            mask_token_id=_mask_token_id(self.mask_token_id, target),
            layer_types=self._layer_types,
            sliding_window=self.sliding_window,
            num_target_layers=sizes["num_hidden_layers"],
            hidden_size=sizes["hidden_size"],
            intermediate_size=self.intermediate_size or sizes["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads
            or sizes.get("num_key_value_heads")
            or heads,
            head_dim=self.head_dim or sizes.get("head_dim") or sizes["hidden_size"] // heads,
            rms_norm_eps=sizes["rms_norm_eps"],
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=sizes["max_position_embeddings"],
            vocab_size=sizes["vocab_size"],
        )


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """A drafter completely described: what its ``config.json`` says."""

    num_layers: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None
    num_target_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    vocab_size: int

    def __post_init__(self) -> None:
        _check_layers(self.num_layers, self.layer_types, self.sliding_window)
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        if not ids or len(set(ids)) != len(ids) or not all(0 <= i <= last for i in ids):
            raise ValueError(
                f"target_layer_ids must be distinct, at least one, and within 0..{last} (the "
                f"target has {self.num_target_layers} layers), got {list(ids)}."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                "mask_token_id must be a row of the target's embedding "
                f"(0..{self.vocab_size - 1}), "
                f"got {self.mask_token_id}."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterSpec":
        """The inverse of :meth:`to_dict`."""
        lists = ("target_layer_ids", "layer_types")
        fields: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in values.items()}
        return cls(**fields)


def _check_layers(
    num_layers: int, layer_types: tuple[LayerType, ...], sliding_window: int | None
) -> None:
    """Refuse layer types that are unknown, miscounted, or at odds with the window."""
    if len(layer_types) != num_layers:
        raise ValueError(
            f"layer_types must name one type per layer ({num_layers}), got {len(layer_types)}."
        )
    if not set(layer_types) <= set(get_args(LayerType)):
        raise ValueError(
            f"layer_types must be of {', '.join(get_args(LayerType))}, got {list(layer_types)}."
        )
    if ("sliding_attention" in layer_types) != (sliding_window is not None):
        raise ValueError(
            "sliding_window and a sliding_attention entry in layer_types go together, got "
            f"sliding_window={sliding_window} and layer_types={list(layer_types)}."
        )
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}.")


def spec_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """In what two descriptions of a drafter differ, in words; empty where they do not.

    >>> spec_differences({"block_size": 8, "num_layers": 5}, {"block_size": 16, "num_layers": 5})
    'block_size (8 there, 16 here)'
    """
    differing = {k: (v, ours[k]) for k, v in theirs.items() if v != ours[k]}
    return ", ".join(f"{k} ({a} there, {b} here)" for k, (a, b) in differing.items())


def default_layer_ids(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Spread one target layer per draft layer, from the second to the third from last (DFlash).

    >>> default_layer_ids(5, 36)
    (1, 9, 17, 25, 33)
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    ids = tuple(round(1 + i * step) for i in range(num_layers))
    if num_target_layers < 4 or len(set(ids)) != num_layers:
        raise ValueError(
            f"a target of {num_target_layers} layers is too shallow for {num_layers} default "
            f"target_layer_ids. Give target_layer_ids within 0..{num_target_layers - 1}, or fewer "
            "num_layers."
        )
    return ids


def read_rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of rotary embeddings, from the flat (v4) or the nested (v5) fields.

    Raises:
        ValueError: If the two contradict each other or a type is not implemented.
    """
    nested, flat = (dict(config.get(name) or {}) for name in ("rope_parameters", "rope_scaling"))
    bases = {
        "rope_theta": config.get("rope_theta"),
        "rope_parameters.rope_theta": nested.pop("rope_theta", None),
        "rope_scaling.rope_theta": flat.pop("rope_theta", None),
    }
    given = {name: base for name, base in bases.items() if base is not None}
    if not given:
        raise ValueError("the configuration must give rope_theta or rope_parameters.rope_theta.")
    if len(set(given.values())) > 1:
        contradiction = ", ".join(f"{name} = {base}" for name, base in given.items())
        raise ValueError(f"rope_theta must have one value, got {contradiction}.")
    scaling, flat_scaling = _rope_scaling(nested), _rope_scaling(flat)
    if nested and flat and scaling != flat_scaling:
        raise ValueError(f"rope_scaling ({flat_scaling}) contradicts rope_parameters ({scaling}).")
    return float(next(iter(given.values()))), scaling if nested else flat_scaling


def _rope_scaling(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Scaling under its new name; None where there is none."""
    # a drafter rotates its whole head and says so
    scaling = {k: v for k, v in fields.items() if k not in ("type", "partial_rotary_factor")}
    kind = scaling.setdefault("rope_type", fields.get("type", "default"))
    if kind not in ROPE_FIELDS:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_FIELDS)}, got {kind!r}.")
    missing = [name for name in ROPE_FIELDS[kind] if name not in scaling]
    if missing:
        raise ValueError(f"rope_type {kind} needs {', '.join(missing)}, got {sorted(scaling)}.")
    return None if kind == "default" else scaling


def _mask_token_id(given: int | None, target: PretrainedConfig) -> int:
    mask_id = given if given is not None else KNOWN_MASK_IDS.get(target.vocab_size)
    if mask_id is None:
        raise ValueError(
            "mask_token_id must be given: no safe id is known for a vocabulary of "
            f"{target.vocab_size}. Take a reserved token that never occurs in text."
        )
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        taken = getattr(target, name, None)
        if mask_id == taken or (isinstance(taken, list) and mask_id in taken):
            raise ValueError(
                f"mask_token_id must not be the target's {name}, got {mask_id}. "
                "Take a reserved token that never occurs in text."
            )
    return mask_id
