"""The DataModule: every batch is a fresh on-policy rollout."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L

from dapo_pl.data.collate import RolloutBatch, collate
from dapo_pl.rollout.engine import Engine, EngineFailed
from dapo_pl.rollout.ledger import CostLedger
from dapo_pl.rollout.sampler import Rollout, Sampler

log = logging.getLogger(__name__)


class RolloutLoader:
    """A loader with a length: Lightning fetches an unsized one a batch ahead, one policy version too early.

    The returned iterator starts after the steps already trained, so that a resumed epoch goes on where it
    stopped.
    """

    def __init__(self, data: RolloutDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.sampler.settings.steps

    def __iter__(self) -> Iterator[RolloutBatch]:
        while self.data.step < len(self):
            yield self.data.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Position and sampler; kept here because Lightning hands a loader's state back before it iterates."""
        return {"step": self.data.step, "sampler": self.data.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the checkpoint was written."""
        self.data.step = state["step"]
        self.data.sampler.load_state_dict(state["sampler"])


def rollout_data(trainer: L.Trainer) -> RolloutDataModule:
    """The trainer's data module, for callbacks."""
    data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(data, RolloutDataModule)
    return data


class RolloutDataModule(L.LightningDataModule):
    """Brings weights to the engine, asks the sampler for groups, and collates them.

    Args:
        sampler: draws, grades and refills.
        ledger: where the cost of generation is booked.
        make_engine: makes the engine anew when it has failed; None gives up at once.
    """

    def __init__(self, sampler: Sampler, ledger: CostLedger, make_engine: Callable[[], Engine] | None = None) -> None:
        super().__init__()
        self.make_engine = make_engine
        self.sampler = sampler
        self.ledger = ledger
        self.step = 0

    def train_dataloader(self) -> RolloutLoader:
        return RolloutLoader(self)

    def next_batch(self) -> RolloutBatch:
        """One rollout step with the newest weights."""
        sync_seconds = self.sync()
        try:
            rollout = self._sample()
        except EngineFailed as failure:
            rollout = self._once_more(failure)
        self.ledger.update(**rollout.fates, generation_seconds=rollout.seconds)
        self.step += 1
        batch = collate(self.step, rollout, self.sampler.seams, self.sampler.settings.mini_batch_size)
        batch.sync_seconds = sync_seconds
        return batch

    def _sample(self) -> Rollout:
        """The sampler's step, its tokens held against the engine's own count, whatever becomes of it."""
        engine = self.sampler.engine
        before = engine.tokens_generated
        try:
            rollout = self.sampler.sample()
        except BaseException:
            self.ledger.update(tokens_interrupted=engine.tokens_generated - before)
            raise
        booked = sum(amount for name, amount in rollout.fates.items() if name.startswith("tokens_"))
        self.account(engine.tokens_generated - before - int(booked))
        return rollout

    def account(self, unaccounted: int) -> None:
        """Book tokens that the engine counts and nobody else knows of."""
        if unaccounted:
            log.warning(
                "the engine counts %+d tokens more than were accounted for in step %d", unaccounted, self.step
            )
            self.ledger.update(tokens_unaccounted=unaccounted)

    def _once_more(self, failure: EngineFailed) -> Rollout:
        """The step again with a new engine: the same prompts and seeds, none of them counted before."""
        if self.make_engine is None:
            raise failure
        log.warning("the engine failed in step %d (%s); starting it again", self.step + 1, failure)
        with contextlib.suppress(Exception):
            self.sampler.engine.close()
        self.sampler.engine = self.make_engine()
        self.sync()
        return self._sample()

    def sync(self) -> float:
        """Give the engine the module's weights unless it has them; seconds taken."""
        module: Any = self.trainer.lightning_module  # pyright: ignore[reportOptionalMemberAccess]
        engine = self.sampler.engine
        if engine.policy_version == module.policy_version:
            return 0.0
        start = time.perf_counter()
        engine.sync(module.policy_weights(), module.policy_version)
        seconds = time.perf_counter() - start
        self.ledger.update(sync_seconds=seconds)
        return seconds

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Micro-batches are moved one by one during the update, so the batch itself stays where it is."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The ledger; position and sampler are the loader's."""
        return {"ledger": self.ledger.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the totals of the checkpoint."""
        self.ledger.load_state_dict(state_dict["ledger"])
