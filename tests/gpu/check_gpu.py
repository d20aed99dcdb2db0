"""What a GPU has to show: fits on it, the preflight's peak against the real one, speed, phases.

usage: python tests/gpu/check_gpu.py [--device cpu] [--json FILE]

Trains drafters of two random targets, one tiny and one of half a billion parameters, on chats made
up here. On a CPU it runs the tiny one only, to see that the script works; memory is not judged.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import make_tokenizer, write_chats

from dflash_lightning import Batching, DFlashDataModule, DFlashModule, DrafterConfig, RandomTarget
from dflash_lightning.callbacks import Ledger, Preflight
from dflash_lightning.callbacks.ledger_file import last_rows
from dflash_lightning.data.prepare import prepare_store
from dflash_lightning.phases import PHASES

TOLERANCE = 0.1  # of the preflight's peak against the real one
TARGETS = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "num_layers": 4},
    "half a billion": {"vocab_size": 151_936, "hidden_size": 1024, "num_layers": 28},
}


class RealPeak(L.Callback):
    """Most memory of the real steps."""

    def __init__(self) -> None:
        self.bytes = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if pl_module.device.type == "cuda":
            self.bytes = max(self.bytes, torch.cuda.max_memory_allocated(pl_module.device))


def fit(
    store: Path,
    folder: Path,
    sizes: dict[str, int],
    device: str,
    callbacks: list[L.Callback],
    steps: int,
) -> None:
    """One fit as in a notebook, in bfloat16 where the device is a GPU."""
    cuda = device == "cuda"
    target = RandomTarget(**sizes)
    target.dtype = "bfloat16" if cuda else "float32"
    dials = DrafterConfig(
        num_layers=5 if cuda else 1,
        block_size=16,
        target_layer_ids=(0, sizes["num_layers"] - 2),
        mask_token_id=sizes["vocab_size"] - 1,
    )
    budget = 16_384 if cuda else 1024
    trainer = L.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        precision="bf16-mixed" if cuda else "32-true",
        max_steps=steps,
        default_root_dir=folder,
        callbacks=callbacks,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = DFlashDataModule(str(store), Batching(token_budget=budget, max_rows=64), num_workers=2)
    trainer.fit(DFlashModule(target, dials, init="random"), datamodule=data)


def check(name: str, store: Path, folder: Path, device: str, steps: int) -> dict[str, Any]:
    """Peak, speed and phases for one target."""
    preflight, peak = Preflight(), RealPeak()
    fit(store, folder, TARGETS[name], device, [preflight, peak, Ledger()], steps)
    rows = last_rows(folder / "ledger.csv", steps)[3:]
    whole = sum(row["seconds"] for row in rows)
    return {
        "target": name,
        "preflight_peak": preflight.peak_bytes,
        "real_peak": peak.bytes,
        "ratio": round(preflight.peak_bytes / peak.bytes, 3) if peak.bytes else None,
        "tokens_per_second": round(sum(r["tokens"] for r in rows) / whole),
        "preflight_tokens_per_second": round(preflight.tokens_per_second),
        "phases": {
            phase: round(sum(row[f"{phase}_seconds"] for row in rows) / whole, 3)
            for phase in PHASES
        },
    }


def main() -> None:
    """Check every target, print one line of JSON each, fail where a peak was misjudged."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count, longest = (3000, 300) if given.device == "cuda" else (100, 40)
        chats = write_chats(folder / "chats.jsonl", count, longest)
        store = folder / "store"
        prepare_store(chats, make_tokenizer(), store, max_length=2048)
        for target in TARGETS if given.device == "cuda" else ["tiny"]:
            place = folder / target.replace(" ", "-")
            place.mkdir()
            results.append(check(target, store, place, given.device, given.steps))
            sys.stdout.write(json.dumps(results[-1]) + "\n")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    wrong = [r["target"] for r in results if r["ratio"] and abs(r["ratio"] - 1) > TOLERANCE]
    if wrong:
        sys.exit(f"the preflight's peak is more than {TOLERANCE:.0%} off for: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
