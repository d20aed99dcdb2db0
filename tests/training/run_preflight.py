"""A real fit on two processes, with or without preflight: run as a script, once per rank.

usage: run_preflight.py STORE FOLDER {with,without} {adamw,zero,full}

``zero`` shards the moments and keeps gradients in DDP's buckets; on the second rank of ``full``
memory runs out on the longest batch.
"""

import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from dflash_lightning import Batching, DFlashDataModule, DFlashModule, DrafterConfig, RandomTarget
from dflash_lightning.callbacks.preflight import Preflight

BATCHING = Batching(token_budget=400, max_rows=6, num_buckets=3, sort_window=4)
DIALS = DrafterConfig(num_layers=1, block_size=4, target_layer_ids=(0, 2), mask_token_id=500)


class Full(DFlashModule):
    """The second rank runs out of memory on the longest batch, the first is slow on it."""

    def sums(self, batch):
        longest = self.trainer.datamodule.plan.longest.max()
        if batch.input_ids.shape[1] == longest:
            if self.trainer.global_rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            time.sleep(0.5)
        return super().sums(batch)


def main(store: str, folder: str, preflight: str, kind: str) -> None:
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    kind_of_module = Full if kind == "full" else DFlashModule
    module = kind_of_module(RandomTarget(), DIALS, lr=1e-3, shard_optimizer=kind == "zero")
    before = Preflight(enabled=preflight == "with")
    trainer = L.Trainer(
        max_epochs=2,
        max_steps=6,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(gradient_as_bucket_view=kind == "zero"),
        callbacks=[before],
        default_root_dir=folder,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    data = DFlashDataModule(store, BATCHING, num_workers=0, val_fraction=0.2)
    trainer.fit(module, datamodule=data)
    optimizer = trainer.optimizers[0]
    inner = optimizer.optim if kind == "zero" else optimizer
    record = {
        "weights": module.drafter.state_dict(),
        "moments": inner.state_dict()["state"],
        "rates": [group["lr"] for group in optimizer.param_groups],
        "step": trainer.global_step,
        "stats": {k: v for k, v in module.step_stats.items() if not k.endswith("seconds")},
        "tried": [(t.rows, t.width, t.tokens, t.labels, t.loss) for t in before.results],
        "peak": before.peak_bytes,
        "random": torch.get_rng_state(),
    }
    torch.save(record, Path(folder) / f"{preflight}-{kind}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
