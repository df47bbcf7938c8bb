"""TorchTitan's Trainer with owned matrices: knows the last micro-batch, clips by one norm, publishes after loads.

Decides: the few moments of a run that the runtime must be told about. Copies nothing of the Trainer's loop.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.validate import Validator
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from torchtitan_dmuon.outputs import write_keeping
from torchtitan_dmuon.runtime.owned import OwnedMatrices
from torchtitan_dmuon.titan import checks, dist_muon, seams
from torchtitan_dmuon.titan.checkpointing import DMuonCheckpointManager
from torchtitan_dmuon.titan.config import ConfigError, DMuonConfig, retype, uses_dmuon
from torchtitan_dmuon.titan.fsdp_meter import FsdpMeter
from torchtitan_dmuon.titan.gather_muon import GatherMuon
from torchtitan_dmuon.titan.metrics import DMuonMetricsProcessor
from torchtitan_dmuon.titan.platform import on_cpu
from torchtitan_dmuon.titan.validator import DMuonValidator


class DMuonTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        dmuon: DMuonConfig = field(default_factory=DMuonConfig)
        """Owner-placed Muon."""

        def __post_init__(self) -> None:
            checks.check_axes(self)  # before TorchTitan speaks of what it would need on the way there
            Trainer.Config.__post_init__(self)

    def __init__(self, config: Config) -> None:
        # Also for those who come through TorchTitan's own entry point, where nothing has looked at the flags yet.
        checks.check_mesh(config, int(os.environ["WORLD_SIZE"]))
        checks.check_dmuon(config)
        checks.settle(config)
        if line := checks.without_effect(config):
            logger.warning(line)
        if uses_dmuon(config) and config.model_spec is not None:
            from torchtitan_dmuon.titan.parallelize import with_owned_matrices

            self._defer_reduce = _defers(config)
            config.model_spec = with_owned_matrices(config.model_spec, config)
        if type(config.metrics) is MetricsProcessor.Config:
            config.metrics = retype(config.metrics, DMuonMetricsProcessor.Config)
        if type(config.validator) is Validator.Config:
            config.validator = retype(config.validator, DMuonValidator.Config)
        if type(config.checkpoint) is CheckpointManager.Config:
            config.checkpoint = retype(config.checkpoint, DMuonCheckpointManager.Config)
        self._micro_batch = 0
        super().__init__(config)
        if isinstance(self.checkpointer, DMuonCheckpointManager):
            self.checkpointer.on_optimizer_change = config.dmuon.on_optimizer_change
        owned = self.owned
        if isinstance(self.metrics_processor, DMuonMetricsProcessor) and dist.get_world_size() > 1:
            self.metrics_processor.fsdp = self._metered(config)
        if owned is not None:
            self._save_plan(owned)

    def _metered(self, config: Config) -> FsdpMeter | None:
        """FSDP2's collectives counted, or None and a line in the log."""
        per_node = config.dmuon.ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        unmetered, meter = "parallelism.enable_fsdp_symm_mem brings collectives of its own", None
        if not config.parallelism.enable_fsdp_symm_mem:
            meter = FsdpMeter(self.model_parts, per_node, timed=on_cpu())
            unmetered = meter.unmetered
        if meter is None or unmetered:
            logger.info(f"no dmuon/bytes and no waits of FSDP2: {unmetered}")
            return None
        if not meter.timed:
            logger.info("dmuon/exposed: FSDP2's own waits are not in it; its public settings do not tell them on CUDA")
        for optimizer in self.optimizers:
            if isinstance(optimizer, GatherMuon):
                optimizer.gathered = meter.add_sent
            elif dist_muon.is_dist_muon(optimizer):
                logger.info("no dmuon/bytes: DistMuon's own messages are not counted; its waits are in update_seconds")
        return meter

    @property
    def owned(self) -> OwnedMatrices | None:
        from torchtitan_dmuon.titan.parallelize import owned_of

        return owned_of(self.model_parts[0])

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        owned = self.owned
        if owned is not None:
            last = self._micro_batch == self.gradient_accumulation_steps - 1
            owned.set_is_last_backward(last or not self._defer_reduce, step_follows=last)
            self._micro_batch += 1
        return super().forward_backward_step(**kwargs)

    def train_step(self, data_iterator: Any) -> None:
        if isinstance(self.metrics_processor, DMuonMetricsProcessor):
            self.metrics_processor.step_begins()
        owned = self.owned
        if owned is None:
            return super().train_step(data_iterator)
        self._micro_batch = 0

        def clip(_parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
            return owned.clip_grad_norm_(self.model_parts[0], max_norm)

        with seams.clip_by(clip):
            return super().train_step(data_iterator)

    def train(self) -> None:
        def shorten(timeout: Any) -> None:
            for group in self.owned.groups if self.owned is not None else ():
                dist.set_timeout(timeout, group)

        held = seams.saves_held(self.checkpointer, self._holds_save)
        with _resharding_told(), seams.also_set_timeouts(shorten), held:
            return super().train()

    def _holds_save(self, step: int) -> bool:
        """Whether the step was skipped: its checkpoint would say nothing new, and purge an older, perhaps sound one."""
        optimizer = getattr(self.optimizers, "owned_optimizer", None)
        if optimizer is None or not optimizer.step_was_skipped:
            return False
        if self.config.checkpoint.enable and step % self.config.checkpoint.interval == 0:
            logger.warning(f"step {step} was skipped: no checkpoint is saved")
        return True

    def close(self) -> None:
        super().close()
        owned = self.owned if getattr(self, "model_parts", None) else None
        if owned is not None:
            owned.close()

    def _save_plan(self, owned: OwnedMatrices) -> None:
        if dist.get_rank() != 0:
            return
        path = Path(self.config.dump_folder, "ownership_plan.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_keeping(path, owned.plan.to_json())
        plan = owned.plan.summary()
        logger.info(
            f"ownership plan: {plan['matrices']} matrices in {plan['pieces']} pieces, {plan['riders']} riders, largest "
            f"owner {plan['imbalance']:.3f} times the mean, {plan['idle_owners']} idle owners; saved in {path}"
        )


@contextlib.contextmanager
def _resharding_told() -> Iterator[None]:
    """TorchTitan's data loader refuses the state of another number of ranks (components/dataloader.py:161): say what
    can be done. So does the optimizer that of another momentum (muon.py)."""
    try:
        yield
    except ValueError as error:
        if "momentum_form = " not in str(error):
            raise
        raise ConfigError(str(error), "optimizer.param_groups") from None
    except AssertionError as error:
        if "dataloader resharding is not supported" not in str(error):
            raise
        raise ConfigError(
            "the checkpoint was written by another number of data-parallel ranks, and TorchTitan's data loader cannot "
            'take up its state there; [checkpoint] exclude_from_loading = ["dataloader"] resumes all else and begins '
            "with the data anew",
            "checkpoint.exclude_from_loading",
        ) from None


def _defers(config: DMuonTrainer.Config) -> bool:
    """Whether gradients cross nodes once per step. "auto": where the planned peak stays at AdamW's."""
    if config.dmuon.defer_reduce != "auto":
        return bool(config.dmuon.defer_reduce)
    from torchtitan_dmuon.titan.planning import make_plan
    from torchtitan_dmuon.titan.platform import on_cpu

    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if config.training.global_batch_size <= config.training.local_batch_size * world:
        return True  # one micro-batch: nothing to defer
    planned = make_plan(
        copy.deepcopy(config), world, config.dmuon.ranks_per_node or local, "cpu" if on_cpu() else "cuda"
    )
    if not planned.options.defer_reduce:
        logger.info(
            "dmuon.defer_reduce = auto: gradients cross nodes in every micro-batch, because sums kept inside nodes "
            "would take the planned peak memory above AdamW's; set it to true to keep them anyway"
        )
    return planned.options.defer_reduce
