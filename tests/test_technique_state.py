"""What techniques remember: a run that is stopped and resumed is the run that was not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from scripted_engine import ScriptedEngine
from training import make_module, make_trainer, scripted_sampler

from callbacks.checkpoint import AtomicCheckpointIO, RolloutCheckpoint, StopRequest
from callbacks.techniques.adaptive_overlong import AdaptiveOverlong
from callbacks.techniques.kl_penalty import KLPenalty
from dapo_pl.data.collate import RolloutBatch
from dapo_pl.data.rollout import RolloutDataModule
from dapo_pl.module import DAPOModule
from dapo_pl.seams import Seams


class Watch(L.Callback):
    """Rewards and the distance to the start by step, and a stop request after the step `stop_at`."""

    def __init__(self, stop: StopRequest, stop_at: int) -> None:
        self.stop = stop
        self.stop_at = stop_at
        self.rewards: dict[int, list[float]] = {}
        self.distances: dict[int, float] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        self.rewards[batch.step] = [r.reward for group in batch.rollout.examined for r in group.responses]
        self.distances[batch.step] = trainer.callback_metrics["objective/kl_to_start"].item()
        self.stop.requested = batch.step == self.stop_at


def run(
    model: str, directory: Path, stop_at: int = 0, resume: bool = False
) -> tuple[DAPOModule, AdaptiveOverlong, Watch]:
    """Five rollout steps with both techniques, callbacks in the order in which experiments/assembly.py has them."""
    module = make_module(
        model, Seams(), optimizer=partial(torch.optim.AdamW, lr=1e-3), warmup_rollout_steps=1, gradient_clip=1.0
    )
    # Answers and lengths (1 to 11) follow from prompt and seed, so that the ramp differs from step to step.
    engine = ScriptedEngine(lambda prompt, seed: (seed % 2, 1 + (seed // 2 + prompt) % 11))
    sampler = scripted_sampler(engine, module, steps=5, max_tokens=12)
    stop = StopRequest()
    ramp, watch = AdaptiveOverlong(percentile=50, window=3), Watch(stop, stop_at)
    trainer = make_trainer(
        directory,
        callbacks=[ramp, KLPenalty(0.1), watch, RolloutCheckpoint(directory, 100, stop)],
        plugins=[AtomicCheckpointIO()],
    )
    trainer.fit(
        module,
        datamodule=RolloutDataModule(sampler, module.ledger),
        ckpt_path=directory / "last.ckpt" if resume else None,
    )
    return module, ramp, watch


def test_a_resumed_run_has_the_ramp_and_the_start_of_the_uninterrupted_one(tiny_model: str, tmp_path: Path) -> None:
    whole, whole_ramp, expected = run(tiny_model, tmp_path / "whole")
    assert list(expected.rewards) == [1, 2, 3, 4, 5]
    assert set(expected.rewards[1]) <= {1.0, -1.0}, "no ramp before anything was seen"
    assert not set(expected.rewards[4]) <= {1.0, -1.0}, "a ramp afterwards"

    _, cut_ramp, first = run(tiny_model, tmp_path / "cut", stop_at=2)
    assert list(first.rewards) == [1, 2]
    saved = torch.load(tmp_path / "cut" / "last.ckpt", weights_only=True)
    assert saved["callbacks"]["AdaptiveOverlong"] == cut_ramp.state_dict()
    assert len(saved["callbacks"]["AdaptiveOverlong"]["history"]) == 2, "the step that ends with the save is in it"

    resumed, ramp, second = run(tiny_model, tmp_path / "cut", resume=True)
    assert {**first.rewards, **second.rewards} == expected.rewards
    assert {**first.distances, **second.distances} == pytest.approx(expected.distances)
    assert list(second.rewards) == [3, 4, 5]
    assert ramp.state_dict() == whole_ramp.state_dict()
    for (name, tensor), (_, other) in zip(whole.policy_weights(), resumed.policy_weights(), strict=True):
        assert torch.equal(tensor, other), name
    (start,), (other_start,) = whole.start_policy, resumed.start_policy
    for parameter, other in zip(start.parameters(), other_start.parameters(), strict=True):
        assert torch.equal(parameter, other)
