"""The paper's Figure 7 and 3b, on everything that was generated."""

from __future__ import annotations

import math
from typing import Any

import lightning as L

from dapo_pl.data.collate import RolloutBatch
from dapo_pl.module import DAPOModule
from dapo_pl.rollout.types import Group


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Means and shares over complete groups, by metric name.

    Lengths are those of what was generated, whatever is masked in the loss, and shares of groups are of all
    examined groups, not only the accepted ones. Groups dropped for a failed reward function have no reward.
    """
    responses = [response for group in groups for response in group.responses]
    rewards = [response.reward for group in groups if not group.dropped for response in group.responses]
    right = sum(group.correct == len(group.responses) for group in groups)
    wrong = sum(group.correct == 0 for group in groups)
    return {
        "rollout/response_length_mean": sum(response.length for response in responses) / len(responses),
        "rollout/reward_mean": sum(rewards) / len(rewards) if rewards else math.nan,
        "rollout/accuracy_mean": sum(response.correct for response in responses) / len(responses),
        "rollout/truncated_share": sum(response.truncated for response in responses) / len(responses),
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
        pl_module.log_dict(metrics, batch_size=1)


class CostMonitor(L.Callback):
    """Logs the cost ledger's totals, so that any curve can be drawn over tokens or seconds."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, DAPOModule)
        totals = pl_module.ledger.compute()
        pl_module.log_dict({f"cost/{name}": float(value) for name, value in totals.items()}, batch_size=1)
