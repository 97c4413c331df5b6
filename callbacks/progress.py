"""What the run says while it works: one line per rollout step, and a live line in between on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L

from dapo_pl.data.collate import RolloutBatch
from dapo_pl.data.rollout import rollout_data
from dapo_pl.module import DAPOModule
from dapo_pl.rollout.sampler import SamplerProgress


def duration(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class StatusLine:
    """A line that rewrites itself on a terminal; in a log file, a line now and then when nothing else is said."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()
        self.interval = 0.2 if self.live else 30.0
        self._shown = time.monotonic()

    def update(self, text: str) -> None:
        """Show `text` until the next one, at most every `interval` seconds."""
        now = time.monotonic()
        if now - self._shown < self.interval:
            return
        self._shown = now
        if self.live:
            print(f"\r\x1b[2K{text}", end="", flush=True)
        else:
            print(text, flush=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._shown = time.monotonic()
        print(("\r\x1b[2K" if self.live else "") + text, flush=True)


class ProgressReport(L.Callback):
    """One line per step: reward, accuracy, mixed share, length, entropy, seconds by phase, time left.

    Args:
        status: where to print.
    """

    def __init__(self, status: StatusLine) -> None:
        self.status = status
        self._durations: list[float] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = rollout_data(trainer)
        assert isinstance(pl_module, DAPOModule)
        steps = data.sampler.settings.steps

        def on_rollout(progress: SamplerProgress) -> None:
            rate = progress.tokens / max(progress.seconds, 1e-9)
            self.status.update(
                f"step {data.step + 1}/{steps}  rollout: {progress.accepted}/{progress.wanted} groups accepted, "
                f"{rate:.0f} tokens/s{self._left(steps - data.step)}"
            )

        def on_update(done: int, total: int) -> None:
            self.status.update(
                f"step {data.step}/{steps}  update: {done}/{total} mini-batches{self._left(steps - data.step)}"
            )

        data.sampler.on_progress = on_rollout
        pl_module.on_mini_batch = on_update

    def _left(self, steps: int) -> str:
        if not self._durations:
            return ""
        recent = self._durations[-10:]
        return f"  | about {duration(steps * sum(recent) / len(recent))} left"

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        metric = {name: float(value) for name, value in trainer.callback_metrics.items()}
        steps = len(trainer.train_dataloader)  # pyright: ignore[reportArgumentType]
        rollout = batch.rollout
        self._durations.append(batch.sync_seconds + rollout.seconds + metric["cost/step_update_seconds"])
        tokens = sum(rollout.fates[name] for name in rollout.fates if name.startswith("tokens_"))
        self.status.say(
            f"step {batch.step}/{steps}  reward {metric['rollout/reward_mean']:+.2f}  "
            f"accuracy {metric['rollout/accuracy_mean']:.0%}  mixed {metric['rollout/mixed_share']:.0%}  "
            f"length {metric['rollout/response_length_mean']:.0f}  "
            f"entropy {metric.get('rollout/entropy_mean', float('nan')):.3f}  "
            f"| {len(rollout.accepted)} of {len(rollout.examined)} groups, {tokens / rollout.seconds:.0f} tokens/s, "
            f"rollout {rollout.seconds:.1f} s, update {metric['cost/step_update_seconds']:.1f} s"
            f"{self._left(steps - batch.step)}"
        )
        if rollout.shortfall:
            self.status.say(f"  shortfall: {rollout.shortfall}")
