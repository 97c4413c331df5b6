"""Every response of every step, for analysis and for `engine=replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from dapo_pl.data.collate import RolloutBatch
from dapo_pl.data.rollout import rollout_data
from dapo_pl.rollout.records import drop_after, write_step


class RolloutRecorder(L.Callback):
    """Writes one parquet file a step, see `dapo_pl.rollout.records`.

    It stands before the checkpoint among the callbacks, so that a step a checkpoint holds is a step on disk; a
    resumed run removes what came after its checkpoint and writes it again.

    Args:
        directory: of the files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        drop_after(self.directory, rollout_data(trainer).step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        write_step(self.directory, batch.step, batch.rollout, rollout_data(trainer).sampler.sampling)
