"""Bytes and operations from sizes: against drafters that exist and storages that are alive."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from speed.live_bytes import peak_bytes
from speed.step_memory import peaks_at_size
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from dflash_lightning.assets.known import known_config
from dflash_lightning.budget import (
    PEAK_FLOPS,
    BatchLoad,
    Setup,
    drafter_parameters,
    flops_per_step,
    gradient_copies,
    memory,
    peak_flops,
    refuse_sharded_strategy,
    target_sizes,
)
from dflash_lightning.budget.activations import cast_bytes, packing, target_peak
from dflash_lightning.drafter.config import DrafterConfig, DrafterSpec
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.random_target import RandomTarget

PUBLIC = DrafterConfig(
    target_layer_ids=(1, 16, 31, 46, 61),
    layer_types=("sliding_attention",) * 4 + ("full_attention",),
    sliding_window=2048,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)


def small(**changed: Any) -> DrafterSpec:
    sizes = {
        "num_layers": 4,
        "block_size": 4,
        "target_layer_ids": (0, 3, 5),
        "mask_token_id": 0,
        "layer_types": ("full_attention",) * 4,
        "sliding_window": None,
        "num_target_layers": 8,
        "hidden_size": 64,
        "intermediate_size": 218,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "max_position_embeddings": 1000,
        "vocab_size": 100,
    }
    return DrafterSpec(**{**sizes, **changed})


def public_sliding() -> DrafterSpec:
    """The public drafter of the 27B target, 32 times narrower."""
    return small(
        num_layers=5,
        layer_types=("sliding_attention",) * 4 + ("full_attention",),
        sliding_window=50,
        hidden_size=160,
        intermediate_size=544,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=4,
        block_size=16,
    )


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [small(), public_sliding(), small(num_layers=1, layer_types=("full_attention",), head_dim=48)],
)
def test_the_closed_form_counts_every_weight_of_a_drafter(spec: DrafterSpec) -> None:
    assert drafter_parameters(spec) == sum(p.numel() for p in Drafter(spec).parameters())


def test_the_public_drafter_of_the_27b_target_has_1_73_billion_weights() -> None:
    spec = PUBLIC.for_target(known_config("Qwen/Qwen3.6-27B"))
    with torch.device("meta"):
        built = sum(p.numel() for p in Drafter(spec).parameters())
    assert drafter_parameters(spec) == built
    assert built == pytest.approx(1.73e9, rel=0.002)


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen/Qwen3.6-27B", 26.896), ("/models/qwen3-8b", 8.191)]
)
def test_bundled_targets_have_their_published_size(name: str, billions: float) -> None:
    config = known_config(name)
    assert config is not None
    assert target_sizes(config).parameters / 1e9 == pytest.approx(billions, abs=0.001)
    assert known_config(name + "-Base") is None


def test_sizes_of_a_hybrid_target() -> None:
    sizes = target_sizes(known_config("Qwen/Qwen3.6-27B"))
    assert sizes.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 16
    outside = 2 * 248_320 * 5120 + 5120  # embedding, untied head, final norm
    assert sum(sizes.layer_parameters) + outside == sizes.parameters
    assert (sizes.query_width, sizes.key_width) == (24 * 256, 4 * 256)
    assert (sizes.linear_heads, sizes.linear_key_width, sizes.linear_head_dim) == (48, 2048, 128)


# -- memory against storages that are alive --------------------------------------------------------


def estimated(spec: DrafterSpec, load: BatchLoad, setup: Setup) -> int:
    """Bytes of the drafter's phase on the sheet, whatever the target."""
    config = Qwen3Config(vocab_size=spec.vocab_size, hidden_size=spec.hidden_size,
                         num_hidden_layers=8, num_attention_heads=4, head_dim=8)  # fmt: skip
    return memory(target_sizes(config), spec, load, setup).total("drafter")


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("mixed", "narrow"), [(False, False), (False, True), (True, False), (True, True)]
)
@pytest.mark.parametrize(
    ("spec", "rows", "width", "slots"),
    [(small(), 2, 200, 40), (small(), 8, 60, 7), (public_sliding(), 3, 200, 25)],
)
def test_drafter_memory_is_what_is_alive(
    spec: DrafterSpec, rows: int, width: int, slots: int, mixed: bool, narrow: bool, again: bool
) -> None:
    load = BatchLoad(rows * width, rows, rows * slots, width)
    setup = Setup(
        target_bytes=2 if narrow else 4,
        compute_bytes=2 if mixed else 4,
        activation_checkpointing=again,
        attention="sdpa",
        on_gpu=False,
    )
    real = peaks_at_size(spec, load, setup, fake=False).drafter
    assert 0.97 * real < estimated(spec, load, setup) < 1.1 * real


MANY, FEW = BatchLoad(8192, 4, 1024, 2048), BatchLoad(16_384, 2, 24, 8192)
SHORT = BatchLoad(8192, 8, 512, 1024)


@pytest.mark.parametrize(
    ("load", "attention", "size", "again"),
    [
        (MANY, "flex", 4, True),
        (MANY, "flex", 2, False),
        (SHORT, "flex", 2, True),
        (SHORT, "sdpa", 4, True),
        (FEW, "flex", 2, True),
        (FEW, "sdpa", 4, False),
    ],
)
def test_at_the_sizes_of_the_27b_target_memory_is_what_is_alive(
    load: BatchLoad, attention: Any, size: int, again: bool
) -> None:
    spec = PUBLIC.for_target(known_config("Qwen/Qwen3.6-27B"))
    setup = Setup(
        target_bytes=size,
        compute_bytes=size,
        activation_checkpointing=again,
        attention=attention,
        on_gpu=False,
    )
    real = peaks_at_size(spec, load, setup).drafter
    assert 0.975 * real < estimated(spec, load, setup) < 1.04 * real


def hybrid(kinds: list[str], **changed: Any) -> PretrainedConfig:
    """The 27B target's proportions, 16 times narrower."""
    config = known_config("Qwen/Qwen3.6-27B").to_dict()
    config.update(
        vocab_size=300,
        hidden_size=320,
        intermediate_size=1088,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        num_attention_heads=6,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_value_heads=3,
        linear_num_key_heads=1,
        rope_parameters={**config["rope_parameters"], "mrope_section": [3, 3, 2]},
    )
    config.update(changed)
    return type(known_config("Qwen/Qwen3.6-27B"))(**config)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(vocab_size=300, hidden_size=256, intermediate_size=768, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=1, head_dim=64),
        hybrid(["full_attention"] * 2),
        hybrid(["full_attention"] * 2, num_attention_heads=12),
        hybrid(["linear_attention"] * 2),
        hybrid(["linear_attention"] * 2, linear_num_value_heads=6, linear_key_head_dim=64,
               linear_value_head_dim=64),
    ],
)  # fmt: skip
def test_target_memory_is_what_is_alive(config: PretrainedConfig) -> None:
    target = RandomTarget()
    target._config = config
    target._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.zeros(2, 512, dtype=torch.int64)
    peak = peak_bytes(lambda: target.context_features(ids, (1,)))
    # the formula also keeps the features of the wanted layers, which here come after the peak
    kept = config.hidden_size * 2
    estimate = target_peak(target_sizes(config), (1,), ids.numel(), 2) - ids.numel() * kept
    assert 0.95 * peak < estimate < 1.1 * peak


# -- the sheet -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big() -> tuple:
    config = known_config("Qwen/Qwen3.6-27B")
    return target_sizes(config), PUBLIC.for_target(config), BatchLoad(46_080, 5, 870, 8192)


def line(sheet: Any, name: str) -> int:
    (found,) = (item.bytes for item in sheet.lines if item.name == name)
    return found


def test_weights_gradients_and_moments_of_the_sheet(big: tuple) -> None:
    plain = memory(*big, Setup(ranks=8, gradients=2))
    lean = memory(*big, Setup(ranks=8, gradients=1, shard_optimizer=True))
    weights = 4 * drafter_parameters(big[1])
    assert line(plain, "target weights") == 2 * big[0].parameters
    assert line(plain, "drafter weights") == weights
    assert line(plain, "gradients") == 2 * line(lean, "gradients") == 2 * weights
    assert line(plain, "moments") == 2 * weights
    assert line(lean, "moments") == weights // 4
    assert all(item.bytes >= 0 and item.why for item in plain.lines)


def test_the_peak_is_what_stays_and_the_largest_phase(big: tuple) -> None:
    sheet = memory(*big, Setup(ranks=8, activation_checkpointing=True))
    phases = {phase: sheet.total(phase) for phase in ("target", "drafter", "optimizer")}
    assert sheet.peak == sheet.total("always") + max(phases.values())
    assert phases[sheet.worst_phase] == max(phases.values())
    assert sum(phases.values()) + sheet.total("always") == sum(x.bytes for x in sheet.lines)


def test_every_setting_that_saves_memory_saves(big: tuple) -> None:
    target, spec, load = big
    plain = Setup(ranks=8, gradients=2)
    peak = memory(target, spec, load, plain).peak
    for setting in (
        {"gradients": 1},
        {"shard_optimizer": True},
        {"activation_checkpointing": True},
    ):
        assert memory(target, spec, load, replace(plain, **setting)).peak < peak
    assert memory(target, spec, load._replace(slots=320), plain).peak < peak
    assert memory(target, spec, load._replace(tokens=23_040, rows=2), plain).peak < peak


def test_flex_packs_a_batch_once_and_sdpa_copies_the_context_of_every_chunk(big: tuple) -> None:
    _, spec, load = big
    blocks = 870 * 16  # 108.75 tiles of 128
    assert packing(spec, load, Setup()) == (109 * 128, 46_080 + 109 * 128)
    seen = 5 * 11 * int(8192 * 12 / 22)  # five rows, 11 chunks of 16 anchors, evenly spread
    on_cpu = packing(spec, load, Setup(attention="sdpa", on_gpu=False))
    assert on_cpu.queries == blocks
    assert on_cpu.keys == pytest.approx(seen + blocks, rel=1e-3)
    # on a GPU the 8 key heads are repeated for 32 query heads
    assert packing(spec, load, Setup(attention="sdpa")).keys == 4 * on_cpu.keys


def test_goals_of_the_target_run_all_its_layers_and_more_products(big: tuple) -> None:
    target, spec, _ = big
    work = [
        flops_per_step(
            target,
            spec,
            tokens=100,
            width=0,
            slots=10,
            labels=9 * 15,
            goal=goal,
            checkpointing=True,
        )
        for goal in ("ce", "kl")
    ]
    assert work[1]["drafter"] == work[0]["drafter"]
    assert work[1]["head"] == 1.5 * work[0]["head"]
    above = 2 * 100 * sum(target.layer_parameters[62:])
    above += 100 * 6 * target.linear_heads * target.linear_head_dim**2  # layer 62 of 62, 63
    assert work[1]["target"] == pytest.approx(work[0]["target"] + above)
    buffers = {
        goal: line(memory(*big, Setup(goal=goal)), "head's buffers")
        for goal in ("ce", "argmax", "kl")
    }
    assert buffers["ce"] == buffers["argmax"] == 100 * 248_320 * (4 + 2)
    assert buffers["kl"] == 33 * 248_320 * (3 * 4 + 2)  # three float32 tensors share the limit


def test_copies_of_matrices_by_moment() -> None:
    spec = small()  # 64 wide, 4 heads and 2 key heads of 8, 218 in between, 4 layers, 3 ids
    keys = 2 * 64 * 16
    layer, fusion = 2 * 64 * 32 + keys + 3 * 64 * 218, 3 * 64 * 64
    again = Setup(activation_checkpointing=True)
    assert cast_bytes(spec, Setup()) == (2 * (fusion + 4 * layer), 2 * 4 * layer, 2 * 4 * keys)
    assert cast_bytes(spec, again).backward == 2 * (4 * keys + layer)
    assert cast_bytes(spec, Setup(compute_bytes=4)) == (0, 0, 0)


def test_few_labels_need_no_whole_buffer(big: tuple) -> None:
    target, spec, load = big
    sheet = memory(target, spec, load._replace(slots=2), Setup())
    assert line(sheet, "head's buffers") == 2 * 15 * 248_320 * (4 + 2)


# -- strategies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        "deepspeed_stage_2",
        {"class_path": "lightning.pytorch.strategies.FSDPStrategy"},
        Namespace(class_path="lightning.pytorch.strategies.ModelParallelStrategy"),
    ],
)
def test_strategies_that_cut_weights_are_refused(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"trainer\.strategy must be .*shard_optimizer=true"):
        refuse_sharded_strategy(strategy)


@pytest.mark.parametrize(
    "strategy", ["auto", "ddp", Namespace(class_path="lightning.pytorch.strategies.DDPStrategy")]
)
def test_other_strategies_pass(strategy: Any) -> None:
    refuse_sharded_strategy(strategy)


def test_copies_of_the_gradients() -> None:
    viewed = Namespace(
        class_path="lightning.pytorch.strategies.DDPStrategy",
        dict_kwargs={"gradient_as_bucket_view": True},
    )
    assert gradient_copies("auto", ranks=1) == 1
    assert gradient_copies("ddp", ranks=2) == 2
    assert gradient_copies(viewed, ranks=2) == 1
    assert gradient_copies(viewed, ranks=2, accumulate=2) == 2
    assert gradient_copies(viewed, ranks=1, accumulate=2) == 1
    assert gradient_copies({"class_path": "a.DDPStrategy", "init_args": {}}, ranks=2) == 2


# -- operations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
def test_drafter_operations_are_those_that_run(again: bool) -> None:
    spec, rows, width, slots = small(head_dim=16), 2, 64, 8
    drafter = Drafter(spec, checkpoint_layers=again)
    features = torch.randn(rows, width, 3 * spec.hidden_size)
    blocks = torch.randn(rows, slots, spec.block_size, spec.hidden_size)
    anchors = torch.arange(8, 64, 7)[:slots].expand(rows, slots).contiguous()
    with FlopCounterMode(display=False) as counter:
        drafter(
            features, blocks, anchors, torch.ones_like(anchors, dtype=torch.bool)
        ).sum().backward()
    matrices = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    config = Qwen3Config(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # fmt: skip
    work = flops_per_step(
        target_sizes(config),
        spec,
        tokens=rows * width,
        width=0,  # without scores: the fused kernel of a CPU is not counted
        slots=rows * slots,
        labels=0,
        checkpointing=again,
    )
    # keys and values of the blocks' own slots are among the layers' matrices
    assert work["drafter"] == pytest.approx(matrices, rel=0.02)
    assert work["head"] == 0


def test_target_operations_are_those_that_run() -> None:
    config = Qwen3Config(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=8,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # fmt: skip
    target = RandomTarget()
    target._config, target._model = config, AutoModelForCausalLM.from_config(config).eval()
    with FlopCounterMode(display=False) as counter:
        target.context_features(torch.zeros(2, 64, dtype=torch.int64), (0, 5))
    matrices = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    work = flops_per_step(target_sizes(config), small(), tokens=128, width=0, slots=0, labels=0)
    assert work["target"] == pytest.approx(matrices, rel=0.02)


def test_peaks_are_found_by_a_part_of_the_name() -> None:
    assert peak_flops("NVIDIA H200") == 989.5e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA RTX PRO 6000 Blackwell Server Edition") == 503.8e12
    assert peak_flops("NVIDIA GB200") == 2.5e15
    assert peak_flops("Radeon") is None
    names = list(PEAK_FLOPS)
    for i, name in enumerate(names):  # a longer name is not hidden by a shorter one before it
        assert not any(earlier in name for earlier in names[:i])
