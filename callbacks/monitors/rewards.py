"""What the reward is made of, and how often its functions fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning as L

from dapo_pl.data.collate import RolloutBatch
from dapo_pl.rollout.task_reward import TaskReward
from dapo_pl.rollout.types import Group


def reward_metrics(groups: Sequence[Group], functions: Sequence[str]) -> dict[str, float]:
    """Mean of every part of the reward, and the failures of `functions`, over all examined groups.

    Means leave out groups without rewards (dropped, or rejected early), and are NaN where all were: Lightning would
    repeat the last value.
    """
    responses = [response for group in groups for response in group.responses]
    kept = [response for group in groups if group.scored for response in group.responses]
    names = {*functions, *(name for response in responses for name in response.reward_components)}
    metrics = {
        f"reward/{name}_mean": sum(response.reward_components[name] for response in kept) / len(kept)
        if kept
        else math.nan
        for name in sorted(names)
    }
    for name in functions:
        metrics[f"reward/{name}_failures"] = float(sum(name in response.reward_failures for response in responses))
    if functions:
        metrics["reward/groups_dropped"] = float(sum(group.dropped for group in groups))
    return metrics


class RewardMonitor(L.Callback):
    """Logs `reward_metrics` of each step, and ends the reward's worker processes with the run.

    Args:
        reward: the functions being run; None where the reward is the plain correctness.
    """

    def __init__(self, reward: TaskReward | None) -> None:
        self.reward = reward

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        functions = [] if self.reward is None else [part.name for part in self.reward.settings.components]
        pl_module.log_dict(reward_metrics(batch.rollout.examined, functions), batch_size=1)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.reward is not None:
            self.reward.close()
