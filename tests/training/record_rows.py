"""A real fit in which every rank writes down what it was given: run as a script, once per rank.

usage: record_rows.py STORE FOLDER DEVICES WORKERS ACCUMULATE
"""

import json
import sys
from pathlib import Path

import lightning as L
import torch

from dflash_lightning import Batching, DFlashDataModule, DFlashModule, DrafterConfig, RandomTarget

BATCHING = Batching(token_budget=400, max_rows=6, num_buckets=3, sort_window=4)
VAL_FRACTION = 0.2


class RecordRows(L.Callback):
    """Writes ``rank<r>.json``: per epoch, rows and width of every batch in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[int, list[tuple[list[int], int]]] = {}
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        found = (batch.rows.tolist(), batch.input_ids.shape[1])
        self.seen.setdefault(trainer.current_epoch, []).append(found)

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.steps.append(trainer.global_step)

    def on_train_end(self, trainer, pl_module) -> None:
        record = {
            "epochs": self.seen,
            "steps": self.steps,
            "planned": trainer.datamodule.num_steps(2),
        }
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(record))


def main(store: str, folder: str, devices: str, workers: str, accumulate: str) -> None:
    torch.set_num_threads(1)
    dials = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=(0, 2), mask_token_id=500)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=int(devices),
        strategy="ddp",
        accumulate_grad_batches=int(accumulate),
        callbacks=[RecordRows(Path(folder))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = DFlashDataModule(store, BATCHING, num_workers=int(workers), val_fraction=VAL_FRACTION)
    trainer.fit(DFlashModule(RandomTarget(), dials, lr=1e-3), datamodule=data)


if __name__ == "__main__":
    main(*sys.argv[1:])
