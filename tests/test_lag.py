"""On-policy means on-policy: every response is made by the weights that are about to be updated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from scripted_engine import ScriptedEngine
from training import make_module, make_trainer, scripted_sampler

from dapo_pl.data.rollout import RolloutDataModule
from dapo_pl.seams import Seams


class Lags(L.Callback):
    """What the module logged, step by step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["engine/policy_lag_max"]))


class Unsized(RolloutDataModule):
    """The same data without a length, which Lightning fetches one batch ahead."""

    def train_dataloader(self) -> Any:
        sized = super().train_dataloader()

        class Loader:
            def __iter__(self) -> Iterator:
                return iter(sized)

        return Loader()


@pytest.mark.parametrize(("kind", "expected"), [(RolloutDataModule, [0, 0, 0, 0]), (Unsized, [0, 2, 2, 2])])
def test_lag_is_zero_and_the_metric_would_tell(
    tiny_model: str, tmp_path: Path, kind: type[RolloutDataModule], expected: list[int]
) -> None:
    """Two optimizer steps a rollout step: a batch fetched one step ahead is two policy versions old."""
    module = make_module(tiny_model, Seams(), optimizer=None)
    import torch

    module.make_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)
    engine = ScriptedEngine(lambda prompt, seed: (seed % 2, 1 + seed % 5))
    sampler = scripted_sampler(engine, module, steps=4)
    lags = Lags()
    trainer = make_trainer(tmp_path, callbacks=[lags])
    trainer.fit(module, datamodule=kind(sampler, module.ledger))
    assert lags.seen == expected
    assert module.policy_version == 8
