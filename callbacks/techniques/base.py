"""What a technique is."""

from __future__ import annotations

import lightning as L

from dapo_pl.module import DAPOModule
from dapo_pl.seams import Seams


class Technique(L.Callback):
    """A callback that changes its own seam when training is set up, and does nothing else.

    A subclass writes `apply`. The same method runs once more on a scratch `Seams` before any model loads, so
    that a conflict between techniques is found at start-up; it must not depend on anything but its own
    settings.
    """

    @property
    def name(self) -> str:
        """The class name, as it appears in messages."""
        return type(self).__name__

    def apply(self, seams: Seams) -> None:
        """Change the technique's seam."""
        raise NotImplementedError

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, DAPOModule)
        if stage == "fit":
            self.apply(pl_module.seams)
