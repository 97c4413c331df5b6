"""An engine that breaks down in the middle of a step costs the step's time and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripted_engine import ScriptedEngine
from training import make_module, make_trainer, scripted_sampler

from dapo_pl.data.rollout import RolloutDataModule
from dapo_pl.rollout.engine import EngineFailed
from dapo_pl.rollout.types import Response
from dapo_pl.seams import Seams


def script(prompt: int, seed: int) -> tuple[int, int]:
    return seed % 2, 1 + seed % 5


class Breaking(ScriptedEngine):
    """Raises at its n-th step, and from then on at everything."""

    def __init__(self, breaks_at: int) -> None:
        super().__init__(script)
        self.left = breaks_at

    def step(self) -> list[tuple[str, Response]]:
        self.left -= 1
        if self.left <= 0:
            raise OSError("the device is gone")
        return super().step()

    def abort(self, requests: object) -> int:
        if self.left <= 0:
            raise OSError("the device is still gone")
        return super().abort(requests)  # pyright: ignore[reportArgumentType]


def trained(
    model: str, directory: Path, engine: ScriptedEngine, make_engine: Callable[[], ScriptedEngine] | None
) -> tuple[dict[str, torch.Tensor], RolloutDataModule]:
    module = make_module(model, Seams())
    sampler = scripted_sampler(engine, module, steps=3)
    data = RolloutDataModule(sampler, module.ledger, make_engine)
    make_trainer(directory).fit(module, datamodule=data)
    return dict(module.state_dict()), data


@pytest.mark.parametrize("breaks_at", [1, 4, 8])
def test_the_step_is_done_again_and_nothing_is_counted_twice(tiny_model: str, tmp_path: Path, breaks_at: int) -> None:
    weights, whole = trained(tiny_model, tmp_path, ScriptedEngine(script), None)
    first, second = Breaking(breaks_at), ScriptedEngine(script)
    again, broken = trained(tiny_model, tmp_path, first, lambda: second)
    for name, tensor in weights.items():
        if name.startswith("policy."):  # the ledger is in there too, with its seconds
            assert torch.equal(tensor, again[name]), name
    assert broken.sampler.cursor == whole.sampler.cursor
    cost = broken.ledger.compute()
    assert cost["tokens_generated"] == first.tokens_generated + second.tokens_generated
    cost["tokens_generated"] -= cost.pop("tokens_interrupted")
    for name, amount in whole.ledger.compute().items():
        if "seconds" not in name and name in cost:
            assert cost[name] == amount, name


def test_a_second_failure_in_one_step_ends_the_run(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="the device is gone"):
        trained(tiny_model, tmp_path, Breaking(2), lambda: Breaking(2))
