"""Where every generated token and every second went."""

from __future__ import annotations

from typing import ClassVar

import torch
from torchmetrics import Metric


class CostLedger(Metric):
    """Totals over the run, summed over ranks.

    Every generated token has one fate:

    - `used`: trained on.
    - `filtered_all_correct`, `filtered_all_wrong`, `filtered_other`: the group was not accepted; the last one when
      its rewards are equal for another reason, a reward function failed, or a filter of the user's refused it.
    - `early_rejected`: the group was given up after its first responses.
    - `beyond_need`: the group was complete, but the batch was full before its turn came.
    - `cut_off`: still being generated when the batch was full.
    - `interrupted`: the run was stopped, or the engine failed, before the step was complete (responses not counted).
    - `evaluation`.
    - `unaccounted`: the engine's own count less all of these; 0, or something is wrong.

    Seconds are wall-clock.
    """

    FATES: ClassVar[tuple[str, ...]] = (
        "used",
        "filtered_all_correct",
        "filtered_all_wrong",
        "filtered_other",
        "early_rejected",
        "beyond_need",
        "cut_off",
        "interrupted",
        "evaluation",
        "unaccounted",
    )
    PHASES: ClassVar[tuple[str, ...]] = ("generation", "update", "sync", "evaluation")

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        for fate in self.FATES:
            self._total(f"responses_{fate}", torch.int64)
            self._total(f"tokens_{fate}", torch.int64)
        for phase in self.PHASES:
            self._total(f"{phase}_seconds", torch.float64)

    def _total(self, name: str, dtype: torch.dtype) -> None:
        self.add_state(name, torch.zeros((), dtype=dtype), dist_reduce_fx="sum", persistent=True)

    def update(self, **amounts: float) -> None:
        """Add to totals by name, such as `tokens_used=512` or `generation_seconds=3.1`."""
        for name, amount in amounts.items():
            total = getattr(self, name)
            total += amount if total.is_floating_point() else int(amount)

    def compute(self) -> dict[str, float]:
        """All totals, and of training what was generated and filtered, by the names of the cost curves."""
        totals = {name: getattr(self, name).item() for name in self._defaults}
        for unit in ("responses", "tokens"):
            fates = [fate for fate in self.FATES if fate != "evaluation"]
            totals[f"{unit}_generated"] = sum(totals[f"{unit}_{fate}"] for fate in fates)
            totals[f"{unit}_filtered"] = sum(
                totals[f"{unit}_{fate}"] for fate in fates if fate.startswith("filtered")
            )
        return totals
