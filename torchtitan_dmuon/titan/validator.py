"""TorchTitan's validation with owned matrices. The hooks gather for it as for any forward; its seconds, waits and
messages are in none of the figures that `metrics.py` gives for steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchtitan.components.validate import Validator

from torchtitan_dmuon.titan.metrics import DMuonMetricsProcessor


class DMuonValidator(Validator):
    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        if not isinstance(self.metrics_processor, DMuonMetricsProcessor):
            return super().validate(model_parts, step)
        with self.metrics_processor.paused():
            return super().validate(model_parts, step)
