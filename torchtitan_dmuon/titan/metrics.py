"""TorchTitan's metrics processor with the runtime's figures beside its own.

Decides: what is logged under `dmuon/`, as means over the steps since the last log and over all ranks. Collectives run
on every rank, at the steps that are logged. Step and update seconds, waits for gathers and reduces and bytes are there
for every optimizer, FSDP2's own collectives included, so that runs can be compared; what cannot be measured is absent
(`fsdp_meter.py`). The other figures are of owned matrices. What a validation waits for and sends is in none of them.

    step_seconds                    wall time of a train step
    update_seconds                  of it, in the optimizers' step: updates, issuing publishes
    ns_share                        the owners' updates (Newton-Schulz and elementwise) over the step
    exposed/{gather,reduce,publish}_seconds   the model's computation waited for communication
    bytes/{intra_node,inter_node}   payload bytes a rank sent; owned_bytes/... those for owned parameters
    owner_imbalance                 largest owner's cost over the mean, as planned
    update_seconds_max_over_median  slowest rank's update against the median's
    skipped_steps, skipped_steps_in_a_row   not means: steps skipped for a gradient that is not finite, since the
                                    process started, and up to the last one
"""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tomli_w
import torch
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor, TensorBoardLogger
from torchtitan.tools.logging import logger

from torchtitan_dmuon.run_files import CONFIG_TAG
from torchtitan_dmuon.runtime.optimizer import OwnedOptimizer
from torchtitan_dmuon.titan.fsdp_meter import DISTANCES, FsdpMeter

_VANISHED = 1e-12  # a norm below it is no gradient: a saturated or broken model
_EXPOSED = ("gather", "reduce", "publish")


class DMuonMetricsProcessor(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.fsdp: FsdpMeter | None = None  # of a run on several ranks
        self._steps = 0
        self._told = False  # that gradients vanished
        self._window_begins = time.perf_counter()

    def keep_config(self, tables: dict[str, Any]) -> None:
        """Write a configuration into the event file, where TensorBoard shows it and `dmuon compare` finds it: the dump
        folder's `config.toml` is the last start's alone."""
        text = textwrap.indent(tomli_w.dumps(tables), "    ")  # code in Markdown, and still TOML
        for each in getattr(self.logger, "_loggers", ()):  # on ranks that log
            if isinstance(each, TensorBoardLogger):
                each.writer.add_text(CONFIG_TAG.removesuffix("/text_summary"), text)

    def step_begins(self) -> None:
        """Called before each train step."""
        if self._steps == 0:
            self._window_begins = time.perf_counter()
        self._steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in here between steps is in no figure under `dmuon/`."""
        begin = time.perf_counter()
        owned = getattr(self.optimizers, "owned", None)
        with contextlib.ExitStack() as uncounted:
            for meter in filter(None, (self.fsdp, owned and owned.engine)):
                uncounted.enter_context(meter.uncounted())
            yield
        self._window_begins += time.perf_counter() - begin

    def log(
        self,
        step: int,
        avg_loss: float,
        max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if grad_norm < _VANISHED and not self._told:
            self._told = True
            logger.warning(
                f"the gradient norm is {grad_norm:g} at step {step}: nothing is learned. Look at the weights that this "
                "run started from, the data and the learning rates"
            )
        extra_metrics = {**(extra_metrics or {}), **self._figures()}
        super().log(step, avg_loss, max_loss, grad_norm, extra_metrics=extra_metrics, **kwargs)

    def _figures(self) -> dict[str, float]:
        container = self.optimizers
        if self._steps == 0 or not hasattr(container, "take_update_seconds"):
            return {}
        steps, self._steps = self._steps, 0
        step_seconds = (time.perf_counter() - self._window_begins) / steps
        mine = {"update_seconds": container.take_update_seconds()}
        owned = container.owned
        if owned is not None:
            optimizer = container.owned_optimizer
            assert isinstance(optimizer, OwnedOptimizer)
            mine["ns_seconds"] = optimizer.take_update_seconds()
            exposed, sent = owned.engine.exposure.take(), owned.engine.take_sent()
            mine |= {f"exposed/{phase}_seconds": exposed.get(phase, 0.0) for phase in _EXPOSED}
            for distance in DISTANCES:
                mine[f"owned_bytes/{distance}"] = sum(n for (_, d), n in sent.items() if d == distance)
        if self.fsdp is not None:
            waited, moved = self.fsdp.take()
            if self.fsdp.timed:
                keys = {f"exposed/{phase}_seconds": value for phase, value in waited.items()}
                mine |= {key: mine.get(key, 0.0) + value for key, value in keys.items()}
            if container.sends_are_counted:
                mine |= {f"bytes/{d}": mine.get(f"owned_bytes/{d}", 0.0) + value for d, value in moved.items()}
        ranks = self._gathered([value / steps for value in mine.values()])
        mean = dict(zip(mine, ranks.mean(dim=0).tolist()))
        ns_seconds = mean.pop("ns_seconds", None)
        figures = {"dmuon/step_seconds": step_seconds} | {f"dmuon/{key}": value for key, value in mean.items()}
        if owned is not None and ns_seconds is not None:
            figures["dmuon/ns_share"] = ns_seconds / step_seconds
            figures["dmuon/skipped_steps"] = float(optimizer.skipped_steps)
            figures["dmuon/skipped_steps_in_a_row"] = float(optimizer.skipped_in_a_row)
            figures["dmuon/owner_imbalance"] = owned.plan.imbalance
            updates = ranks[:, list(mine).index("ns_seconds")]
            figures["dmuon/update_seconds_max_over_median"] = (updates.max() / updates.median().clamp(min=1e-9)).item()
        return figures

    def _gathered(self, mine: list[float]) -> torch.Tensor:
        """[ranks, figures], float64, on the CPU."""
        from torchtitan.tools import utils

        row = torch.tensor(mine, dtype=torch.float64, device=utils.get_local_device())
        if dist.get_world_size() == 1:
            return row.cpu().unsqueeze(0)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return torch.stack(rows).cpu()
