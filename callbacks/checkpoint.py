"""Checkpoints at rollout-step boundaries, written whole or not at all, and a clean stop on Ctrl-C."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from dapo_pl.data.collate import RolloutBatch
from dapo_pl.errors import UserError
from dapo_pl.rollout.sampler import RolloutInterrupted


class AtomicCheckpointIO(CheckpointIO):
    """Writes beside the target and renames: a crash during the write leaves the previous checkpoint whole.

    Loads tensors and plain values only, so that a file from elsewhere cannot run code.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path = Path(path)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except (OSError, RuntimeError) as error:
            # torch reports a full disk as a RuntimeError of its zip writer
            raise UserError(
                f"cannot write the checkpoint {path}: {error}; the previous checkpoint is untouched. "
                "Free space or set output_dir, then resume with ckpt_path=last"
            ) from error
        finally:
            draft.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, map_location: Any | None = None, **kwargs: Any) -> dict[str, Any]:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


class StopRequest:
    """Turns the first Ctrl-C into a request that long work asks about; the second one stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Take over SIGINT for this process."""
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print(
            "\nstopping after the work in hand; a checkpoint follows (Ctrl-C again stops at once, losing this step)",
            flush=True,
        )

    def __call__(self) -> bool:
        return self.requested


class RolloutCheckpoint(L.Callback):
    """Saves `last.ckpt` every n rollout steps, at the end, and when the run is stopped or fails.

    Args:
        directory: where `last.ckpt` stands.
        every_n_steps: rollout steps between checkpoints.
        stop: asked after every step.
    """

    def __init__(self, directory: Path, every_n_steps: int, stop: StopRequest) -> None:
        if every_n_steps < 1:
            raise UserError(f"checkpoint.every_n_steps is {every_n_steps}; it must be at least 1")
        self.path = directory / "last.ckpt"
        self.every_n_steps = every_n_steps
        self.stop = stop
        self.saved_step = -1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        last = batch.step == len(trainer.train_dataloader)  # pyright: ignore[reportArgumentType]
        if self.stop.requested or last or batch.step % self.every_n_steps == 0:
            self._save(trainer, batch.step)
        if self.stop.requested:
            trainer.should_stop = True

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Between steps the state is whole; an error inside the update would save half a step."""
        step = trainer.datamodule.step  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(exception, RolloutInterrupted) and step > self.saved_step:
            self._save(trainer, step)

    def _save(self, trainer: L.Trainer, step: int) -> None:
        trainer.save_checkpoint(self.path)
        self.saved_step = step
