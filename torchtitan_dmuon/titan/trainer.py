"""TorchTitan's Trainer with a [dmuon] table in its config.

Decides: nothing yet beyond the config. Does not copy any of the Trainer's loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan.trainer import Trainer

from torchtitan_dmuon.titan.config import DMuonConfig


class DMuonTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        dmuon: DMuonConfig = field(default_factory=DMuonConfig)
        """Owner-placed Muon."""
