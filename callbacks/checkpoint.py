"""Checkpoints at rollout-step boundaries, written whole or not at all, and a clean stop on Ctrl-C."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from dapo_pl.data.collate import RolloutBatch
from dapo_pl.data.rollout import rollout_data
from dapo_pl.errors import UserError
from dapo_pl.evaluation import EvaluationResult, avg_at_k
from dapo_pl.files import whole_file
from dapo_pl.rollout.engine import EngineFailed
from dapo_pl.rollout.sampler import RolloutInterrupted


class AtomicCheckpointIO(CheckpointIO):
    """Writes beside the target and renames: a crash during the write leaves the previous checkpoint whole.

    Loads tensors and plain values only, so that a file from elsewhere cannot run code.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as draft, draft.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            # torch reports a full disk as a RuntimeError of its zip writer
            raise UserError(
                f"cannot write the checkpoint {path}: {error}; the previous checkpoint is untouched. "
                "Free space or set output_dir, then resume with ckpt_path=last"
            ) from error

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

    A checkpoint also holds the random states and the step's metrics: Lightning hands a step's metrics to the loggers
    only after this callback, so a run killed in between would have a hole in its curves.

    Args:
        directory: where `last.ckpt` stands.
        every_n_steps: rollout steps between checkpoints.
        stop: asked after every step.
        keep_every_n_steps: rollout steps between checkpoints that stay, `step_000050.ckpt`; None keeps none.
    """

    def __init__(
        self, directory: Path, every_n_steps: int, stop: StopRequest, keep_every_n_steps: int | None = None
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep_every_n_steps", keep_every_n_steps)):
            if value is not None and value < 1:
                raise UserError(f"checkpoint.{name} is {value}; it must be at least 1")
        self.path = directory / "last.ckpt"
        self.every_n_steps = every_n_steps
        self.keep_every_n_steps = keep_every_n_steps
        self.stop = stop
        self.saved_step = -1
        self._restored: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._restored:
            restore_random_states(self._restored["random"])
            for logger in trainer.loggers:
                logger.log_metrics(self._restored["metrics"], self._restored["step"])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        last = batch.step == len(trainer.train_dataloader)  # pyright: ignore[reportArgumentType]
        keep = self.keep_every_n_steps is not None and batch.step % self.keep_every_n_steps == 0
        if self.stop.requested or last or keep or batch.step % self.every_n_steps == 0:
            self.save(trainer, batch.step)
        if keep:
            link(self.path, self.path.with_name(f"step_{batch.step:06}.ckpt"))
        if self.stop.requested:
            trainer.should_stop = True

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Between steps the state is whole; an error inside the update would save half a step."""
        if isinstance(exception, RolloutInterrupted | EngineFailed):
            self.save(trainer, rollout_data(trainer).step)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        checkpoint["rollout_checkpoint"] = {
            "step": rollout_data(trainer).step,
            "metrics": {name: value for name, value in metrics.items() if name not in ("step", "epoch")},
            "random": random_states(),
        }

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._restored = checkpoint["rollout_checkpoint"]

    def save(self, trainer: L.Trainer, step: int) -> None:
        """Write `last.ckpt` unless it is of this step already."""
        if step > self.saved_step:
            trainer.save_checkpoint(self.path)
            self.saved_step = step


class BestCheckpoint(L.Callback):
    """Keeps `best.ckpt`, of the evaluated step with the highest avg@k so far.

    Args:
        checkpoint: writes it.
        results: evaluations by rollout step, filled by the evaluation monitor, which must come before this callback.
    """

    def __init__(self, checkpoint: RolloutCheckpoint, results: Mapping[int, EvaluationResult]) -> None:
        self.checkpoint = checkpoint
        self.results = results

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        if batch.step not in self.results:
            return
        accuracy = {step: avg_at_k(result.correct) for step, result in self.results.items() if step > 0}
        # of equals the first: later ones have spent more for the same
        if max(accuracy, key=lambda step: (accuracy[step], -step)) == batch.step:
            self.checkpoint.save(trainer, batch.step)
            link(self.checkpoint.path, self.checkpoint.path.with_name("best.ckpt"))


def link(source: Path, target: Path) -> None:
    """`target` becomes the same file as `source`, which costs no space until `source` is replaced."""
    with whole_file(target) as draft:
        draft.unlink(missing_ok=True)
        try:
            draft.hardlink_to(source)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, draft)


def random_states() -> dict[str, Any]:
    """Those of torch (CPU), numpy and Python, as plain values and tensors.

    The platform draws from seeds by name and needs none of them; a user's technique or reward may.
    """
    name, keys, position, has_gauss, cached = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(words), gauss],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Undo what happened to the random states since `random_states`."""
    torch.set_rng_state(states["torch"])
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
