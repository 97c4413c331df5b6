"""How often each prompt was drawn and trained on, and what its groups came to, by epoch and source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L

from dapo_pl.data.collate import RolloutBatch
from dapo_pl.data.rollout import rollout_data
from dapo_pl.files import whole_file
from dapo_pl.rollout.history import PromptHistory
from dapo_pl.rollout.types import Group

SHARES = {"mixed": "mixed_share", "all_correct": "accuracy_one_share", "all_wrong": "accuracy_zero_share"}


def shares_by_source(groups: list[Group]) -> dict[str, float]:
    """Of the judged groups, by source, what the curves `rollout/mixed_share` and so on are over all of them.

    Nothing for groups of one source: that would say the same twice.
    """
    sources: dict[str, list[str]] = {}
    for group in groups:
        sources.setdefault(group.prompt.source, []).append(group.outcome)
    if len(sources) < 2:
        return {}
    return {
        f"rollout/{source}/{name}": outcomes.count(outcome) / len(outcomes)
        for source, outcomes in sorted(sources.items())
        for outcome, name in SHARES.items()
    }


def prompt_rows(history: PromptHistory) -> list[dict[str, Any]]:
    """One row a prompt, in the order of their first draws; `accuracy` is the mean of the Beta posterior."""
    rows = []
    for name, record in history.prompts.items():
        a, b = history.posterior(name)
        rows.append(
            {
                "id": name,
                "drawn": record.drawn,
                "accepted": record.accepted,
                "rejected": record.rejected,
                "accuracy": a / (a + b),
            }
        )
    return rows


def outcome_rows(history: PromptHistory) -> list[dict[str, Any]]:
    """Groups by epoch (from 1) and source: how many were accepted, and what they turned out to be."""
    return [
        {"epoch": epoch + 1, "source": source, **counts}
        for (epoch, source), counts in sorted(history.outcomes.items())
    ]


class PromptMonitor(L.Callback):
    """Logs `shares_by_source` of each step, and writes `prompts.jsonl` when the run ends or is stopped.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        pl_module.log_dict(shares_by_source(batch.rollout.examined), batch_size=1)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        rows = prompt_rows(rollout_data(trainer).sampler.history)
        with whole_file(self.path) as draft:
            draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
