"""What the training tests share: a tiny policy, recorded groups and a trainer that does nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import AutoModelForCausalLM

from dapo_pl.data.collate import RolloutBatch, collate
from dapo_pl.module import DAPOModule
from dapo_pl.policy import CausalPolicy
from dapo_pl.rollout.engine import Sampling
from dapo_pl.rollout.ledger import CostLedger
from dapo_pl.rollout.sampler import PromptOrder, Rollout, RolloutSettings, Sampler
from dapo_pl.rollout.types import Group, Prompt, Response
from dapo_pl.seams import Seams


def recorded_groups(count: int = 4, size: int = 4, seed: int = 0) -> list[Group]:
    """Groups of unequal lengths with mixed rewards, one response truncated."""
    draw = random.Random(seed)
    groups = []
    for index in range(count):
        prompt = Prompt(str(index), tuple(draw.randrange(4, 100) for _ in range(draw.randint(3, 8))), 1)
        responses = []
        for number in range(size):
            tokens = [draw.randrange(4, 100) for _ in range(draw.randint(1, 12))]
            correct = number % 2 == 0
            responses.append(Response(tokens, "", number == 3, 0, correct=correct, reward=1.0 if correct else -1.0))
        groups.append(Group(index, prompt, responses))
    return groups


def make_module(model: str, seams: Seams, **options: Any) -> DAPOModule:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    share = options.pop("share_prompts", True)
    options.setdefault("optimizer", partial(torch.optim.SGD, lr=0.1))
    options.setdefault("warmup_rollout_steps", 1)
    options.setdefault("gradient_clip", 1e9)
    return DAPOModule(CausalPolicy(network, share_prompts=share), seams, CostLedger(), **options)


def scripted_sampler(engine: Any, module: DAPOModule, *, steps: int, max_tokens: int = 8) -> Sampler:
    """Two groups of four a step, out of eight one-token prompts."""
    return Sampler(
        engine=engine,
        order=PromptOrder([Prompt(str(n), (n + 4,), 1) for n in range(8)], seed=0),
        seams=module.seams,
        settings=RolloutSettings(
            steps=steps, groups_per_step=2, group_size=4, mini_batch_size=4, max_prompts_per_step=8
        ),
        sampling=Sampling(max_tokens=max_tokens),
        seed=0,
    )


class Recorded(L.LightningDataModule):
    """Yields given batches, with a length."""

    def __init__(self, batches: list[RolloutBatch]) -> None:
        super().__init__()
        self.batches = batches
        self.step = 0

    def train_dataloader(self) -> Any:
        batches = self.batches

        class Loader:
            def __len__(self) -> int:
                return len(batches)

            def __iter__(self) -> Iterator[RolloutBatch]:
                return iter(batches)

        return Loader()

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


def make_trainer(directory: Path, **options: Any) -> L.Trainer:
    return L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        default_root_dir=directory,
        logger=options.pop("logger", False),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )


def train_on(
    module: DAPOModule, groups: list[Group], directory: Path, mini_batch_size: int = 16, **options: Any
) -> L.Trainer:
    """One rollout step on recorded groups."""
    batch = collate(1, Rollout(groups, groups, {}, 1.0), module.seams, mini_batch_size)
    trainer = make_trainer(directory, **options)
    trainer.fit(module, datamodule=Recorded([batch]))
    return trainer
