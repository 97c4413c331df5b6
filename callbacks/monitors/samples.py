"""A few responses of every step, to be read by a person."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L

from dapo_pl.data.collate import RolloutBatch
from dapo_pl.data.rollout import rollout_data
from dapo_pl.logs import keep_rows
from dapo_pl.rollout.types import Group, Response


def pick(groups: list[Group]) -> dict[str, tuple[Group, Response]]:
    """The best, worst, longest and a truncated response, by label, each with its group."""
    rewarded = [group for group in groups if group.scored] or groups
    pairs = [(group, response) for group in rewarded for response in group.responses]
    picked = {
        "best": max(pairs, key=lambda pair: pair[1].reward),
        "worst": min(pairs, key=lambda pair: pair[1].reward),
        "longest": max(pairs, key=lambda pair: pair[1].length),
    }
    truncated = [pair for pair in pairs if pair[1].truncated]
    if truncated:
        picked["truncated"] = truncated[0]
    return picked


class SampleLog(L.Callback):
    """Writes picked responses to `samples.jsonl`, and as texts to an Aim logger where there is one.

    Args:
        path: the file.
        every_n_steps: rollout steps between samples.
        decode: prompt token ids -> text.
    """

    def __init__(self, path: Path, every_n_steps: int, decode: Any) -> None:
        self.path = path
        self.every_n_steps = every_n_steps
        self.decode = decode

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget samples of steps that will be trained again."""
        step = rollout_data(trainer).step
        if self.path.exists():
            keep_rows(self.path, lambda row: row["step"] <= step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        if batch.step % self.every_n_steps and batch.step != 1:
            return
        for label, (group, response) in pick(batch.rollout.examined).items():
            record = {
                "step": batch.step,
                "label": label,
                "prompt": self.decode(list(group.prompt.token_ids)),
                "answer": group.prompt.answer,
                "response": response.text,
                "reward": response.reward,
                "correct": response.correct,
                "truncated": response.truncated,
                "length": response.length,
            }
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            for logger in trainer.loggers:
                track = getattr(getattr(logger, "experiment", None), "track", None)
                if track is not None:
                    from aim import Text

                    text = f"{record['prompt']}\n---\n{response.text}\n---\nreward {response.reward:+.2f}"
                    track(Text(text), name="samples", step=batch.step, context={"label": label})
