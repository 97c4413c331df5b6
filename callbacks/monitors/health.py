"""The paper's Figure 7 and 3b, on everything that was generated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L

from dapo_pl.data.collate import RolloutBatch
from dapo_pl.data.rollout import rollout_data
from dapo_pl.module import DAPOModule
from dapo_pl.rollout.types import Group, Response


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Means and shares over the judged groups, by metric name.

    Lengths are those of what was generated, whatever is masked in the loss, and shares of groups are of all
    judged groups, not only the accepted ones. Every group counts as much as any other, also one that was rejected
    early: its first responses are a fair sample of what it would have been, and in the shares it stands as what they
    were. Groups dropped for a failed reward function have no reward, those rejected early none either.
    """

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    def of_each(value: Callable[[Response], float]) -> list[float]:
        return [mean([value(response) for response in group.responses]) for group in groups]

    right = sum(group.correct == len(group.responses) for group in groups)
    wrong = sum(group.correct == 0 for group in groups)
    scored = [response.reward for group in groups if group.scored for response in group.responses]
    return {
        "rollout/response_length_mean": mean(of_each(lambda response: response.length)),
        "rollout/reward_mean": mean(scored),
        "rollout/accuracy_mean": mean(of_each(lambda response: response.correct)),
        "rollout/truncated_share": mean(of_each(lambda response: response.truncated)),
        "rollout/accuracy_one_share": right / len(groups),
        "rollout/accuracy_zero_share": wrong / len(groups),
        "rollout/mixed_share": sum(group.mixed for group in groups) / len(groups),
    }


class HealthMonitor(L.Callback):
    """Logs `rollout_metrics` of each step; entropy and probability come from the update itself."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        metrics = rollout_metrics(batch.rollout.examined)
        metrics["rollout/groups_accepted"] = float(len(batch.rollout.accepted))
        metrics["rollout/groups_examined"] = float(len(batch.rollout.examined))
        metrics |= rollout_data(trainer).sampler.early.metrics()
        pl_module.log_dict(metrics, batch_size=1)


class CostMonitor(L.Callback):
    """Logs the cost ledger's totals, so that any curve can be drawn over tokens or seconds."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, DAPOModule)
        totals = pl_module.ledger.compute()
        pl_module.log_dict({f"cost/{name}": float(value) for name, value in totals.items()}, batch_size=1)
