"""DAPOModule: the policy, the objective and the optimizer, stepped by hand."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dapo_pl.data.collate import MiniBatch, RolloutBatch
from dapo_pl.objective import kl_penalty, loss_denominator, policy_loss
from dapo_pl.policy import CausalPolicy, MicroBatch
from dapo_pl.rollout.ledger import CostLedger
from dapo_pl.seams import Seams

CHECKPOINT_FORMAT = 2
"""Goes up when a run could not go on from an older version's checkpoints. 2: with prompt history and all fates."""


class DAPOModule(L.LightningModule):
    """One `training_step` is one rollout step: several mini-batches, each one optimizer step.

    Optimisation is manual because a token mean needs the whole mini-batch's token count in every
    micro-batch; Lightning's own accumulation would average micro-batches of unequal weight.

    Args:
        policy: the model being trained.
        seams: the method, see `dapo_pl.seams`.
        ledger: where the update's seconds are booked.
        optimizer: parameters -> optimizer.
        warmup_rollout_steps: the learning rate rises linearly over this many *rollout* steps (paper: 20).
        gradient_clip: largest gradient norm (paper: 1.0).
        max_tokens_per_micro_batch: rows × length of one forward pass; memory, not the result, depends on it.
        pad_id: token that fills rows up.
        fingerprint: of the model, so that a checkpoint of another one is refused.
    """

    def __init__(
        self,
        policy: CausalPolicy,
        seams: Seams,
        ledger: CostLedger,
        *,
        optimizer: Callable[[Iterable[Tensor]], Optimizer],
        warmup_rollout_steps: int = 20,
        gradient_clip: float = 1.0,
        max_tokens_per_micro_batch: int = 2048,
        pad_id: int = 0,
        fingerprint: str = "",
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self.seams = seams
        self.ledger = ledger
        self.make_optimizer = optimizer
        self.warmup_rollout_steps = warmup_rollout_steps
        self.gradient_clip = gradient_clip
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.pad_id = pad_id
        self.fingerprint = fingerprint
        self.policy_version = 0
        self.on_mini_batch: Callable[[int, int], None] = lambda done, total: None
        self.skipped_mini_batches = 0
        # A tuple, because torch does not look into one: the frozen copy must be in no checkpoint and get no
        # optimizer step. Empty unless seams.kl_coef is above 0.
        self.start_policy: tuple[CausalPolicy, ...] = ()

    def setup(self, stage: str) -> None:
        """Keep the starting policy if there is a penalty on leaving it; costs one more copy of the weights.

        Lightning calls this after the techniques have changed the seams and before it restores a checkpoint,
        so that a resumed run is held to the start of the first one.
        """
        if stage == "fit" and self.seams.kl_coef > 0 and not self.start_policy:
            self.start_policy = (copy.deepcopy(self.policy).eval().requires_grad_(False),)

    def on_fit_start(self) -> None:
        """Move the frozen copy where the strategy has put the policy, in its precision."""
        for start_policy in self.start_policy:
            start_policy.to(self.device, next(self.policy.parameters()).dtype)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.policy.parameters())
        warmup = max(1, self.warmup_rollout_steps)
        # Stepped once per rollout step: the paper's warm-up counts those, not the optimizer's.
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights under their transformers names, one by one."""
        for name, parameter in self.policy.model.named_parameters():
            yield name, parameter.detach()

    def micro_batches(self, mini_batch: MiniBatch) -> Iterator[MicroBatch]:
        """The mini-batch cut by this module's token budget, on this module's device."""
        for micro in mini_batch.micro_batches(
            max_tokens=self.max_tokens_per_micro_batch,
            share_prompts=self.policy.share_prompts,
            pad_id=self.pad_id,
        ):
            yield micro.to(self.device)

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        start = time.perf_counter()
        lag = max(
            self.policy_version - response.policy_version
            for group in batch.rollout.accepted
            for response in group.responses
        )
        learning_rate = self.optimizers().param_groups[0]["lr"]  # pyright: ignore[reportAttributeAccessIssue]
        # The first mini-batch is trained by the policy that generated it, where the ratio is 1 by
        # construction; only the later ones need log-probs from before the first update.
        old = [None, *(self.old_log_probs(later) for later in batch.mini_batches[1:])]
        totals = UpdateStatistics(kl_to_start=bool(self.start_policy))
        for number, (mini_batch, old_log_probs) in enumerate(zip(batch.mini_batches, old, strict=True)):
            self.update_policy(mini_batch, old_log_probs, totals)
            self.on_mini_batch(number + 1, len(batch.mini_batches))
        self.lr_schedulers().step()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue, reportCallIssue]
        seconds = time.perf_counter() - start
        self.ledger.update(update_seconds=seconds)
        self.log_dict(
            {
                **totals.means(),
                "engine/policy_lag_max": float(lag),
                "policy/learning_rate": learning_rate,
                "policy/optimizer_step": float(self.policy_version),
                "policy/skipped_mini_batches": float(self.skipped_mini_batches),
                "cost/step_generation_seconds": batch.rollout.seconds,
                "cost/step_update_seconds": seconds,
                "cost/step_sync_seconds": batch.sync_seconds,
                "step": float(batch.step),  # Lightning takes this key as the x axis
            },
            batch_size=1,
        )

    @torch.no_grad()
    def old_log_probs(self, mini_batch: MiniBatch) -> Tensor:
        """[responses, tokens] under the policy as it is now, in one pass without gradients."""
        result = torch.zeros(mini_batch.response_mask.shape)
        for micro in self.micro_batches(mini_batch):
            log_probs, _ = self.policy(micro)
            result[micro.responses, : log_probs.shape[1]] = log_probs.float().cpu()
        return result

    def update_policy(self, mini_batch: MiniBatch, old_log_probs: Tensor | None, totals: UpdateStatistics) -> None:
        """One optimizer step on a mini-batch; `old_log_probs` None means the ratio is 1 by construction."""
        seams = self.seams
        local = loss_denominator(mini_batch.response_mask, seams.aggregation).to(self.device)
        # Gradients are averaged over ranks, so each rank's part counts `world_size` times.
        denominator = self.all_ranks_sum(local)
        if denominator == 0:
            # Every response is masked: there is nothing to learn, and decayed weights or stale momentum
            # must not move the policy either.
            self.skipped_mini_batches += 1
            return
        weighting: dict[str, Any] = {
            "aggregation": seams.aggregation,
            "denominator": denominator / self.trainer.world_size,
            "constant_length": seams.constant_length,
        }
        for micro in self.micro_batches(mini_batch):
            log_probs, entropies = self.policy(micro)
            tokens = log_probs.shape[1]
            mask = mini_batch.response_mask[micro.responses, :tokens].to(self.device)
            old = (
                log_probs.detach()
                if old_log_probs is None
                else old_log_probs[micro.responses, :tokens].to(self.device)
            )
            loss, statistics = policy_loss(
                log_probs,
                old,
                mini_batch.advantages[micro.responses].to(self.device),
                mask,
                clip_low=seams.clip_low,
                clip_high=seams.clip_high,
                **weighting,
            )
            for start_policy in self.start_policy:
                with torch.no_grad():
                    start_log_probs, _ = start_policy(micro)
                penalty, distance = kl_penalty(log_probs, start_log_probs, mask, **weighting)
                loss = loss + seams.kl_coef * penalty
                statistics |= distance
            self.manual_backward(loss)
            totals.add(loss, statistics)
            lengths = mini_batch.lengths[micro.responses].to(self.device)
            written = torch.arange(tokens, device=self.device) < lengths[:, None]
            engine = mini_batch.engine_log_probs[micro.responses, :tokens].to(self.device)
            totals.add_generated(old, entropies, engine, written)
        optimizer = self.optimizers()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.gradient_clip)
        totals.grad_norms.append(float(norm))
        optimizer.step()  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.zero_grad()  # pyright: ignore[reportAttributeAccessIssue]
        self.policy_version += 1

    def all_ranks_sum(self, value: Tensor) -> Tensor:
        """Sum of a scalar over ranks."""
        return self.trainer.strategy.reduce(value, reduce_op="sum")  # pyright: ignore[reportReturnType]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["dapo"] = {
            "step": self.trainer.datamodule.step,  # pyright: ignore[reportAttributeAccessIssue]
            "policy_version": self.policy_version,
            "format": CHECKPOINT_FORMAT,
            "fingerprint": self.fingerprint,
            "skipped_mini_batches": self.skipped_mini_batches,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.policy_version = checkpoint["dapo"]["policy_version"]
        self.skipped_mini_batches = checkpoint["dapo"]["skipped_mini_batches"]


class UpdateStatistics:
    """Sums over the micro-batches of a rollout step, turned into the logged means at its end.

    Args:
        kl_to_start: whether the step measures the distance to the starting policy.
    """

    def __init__(self, *, kl_to_start: bool = False) -> None:
        self.kl_to_start = kl_to_start
        self.sums: dict[str, float] = {}
        self.grad_norms: list[float] = []

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value.item()

    def add(self, loss: Tensor, statistics: dict[str, Tensor]) -> None:
        """A micro-batch's loss (parts of a mini-batch add up) and the objective's sums."""
        self._add("loss", loss.detach())
        for name, value in statistics.items():
            self._add(name, value)

    def add_generated(self, log_probs: Tensor, entropies: Tensor, engine: Tensor, written: Tensor) -> None:
        """Per-token values over everything that was written, whatever the mask; all [responses, tokens]."""
        self._add("written", written.sum())
        self._add("entropy", entropies[written].sum())
        self._add("probability", log_probs[written].exp().sum())
        compared = written & ~engine.isnan()
        self._add("compared", compared.sum())
        self._add("gap", (engine - log_probs)[compared].abs().sum())

    def means(self) -> dict[str, float]:
        """By the platform's metric names; a mean over nothing is NaN.

        Leaving it out would not do: Lightning repeats the last value of a name that a step does not log.
        """
        sums = self.sums
        steps = len(self.grad_norms)
        parts = {
            "objective/clip_high_share": ("clip_high", "tokens"),
            "objective/clip_low_share": ("clip_low", "tokens"),
            "objective/up_clipped_probability_mean": ("up_clipped_probability", "clip_high"),
            "objective/ratio_mean": ("ratio", "tokens"),
            "objective/approximate_kl": ("kl", "tokens"),
            "rollout/entropy_mean": ("entropy", "written"),
            "rollout/generation_probability_mean": ("probability", "written"),
            "engine/log_prob_gap_mean": ("gap", "compared"),
        }
        if self.kl_to_start:
            parts["objective/kl_to_start"] = ("kl_to_start", "tokens")
        means = {
            name: sums[top] / sums[bottom] if sums.get(bottom) else math.nan for name, (top, bottom) in parts.items()
        }
        means["objective/loss"] = sums["loss"] / steps if steps else math.nan
        means["policy/grad_norm"] = sum(self.grad_norms) / steps if steps else math.nan
        return means
