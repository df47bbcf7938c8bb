"""Training loops of others around an owned model: Hugging Face's Trainer, Accelerate, Lightning Fabric.

Each trains the Llama of `test_language` on the same batches, and is compared with one process.
"""

import dataclasses
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import transformers

from torchtitan_dmuon.checkpoint import optimizer_state

from .harness import (
    ADAMW,
    MUON,
    STEPS,
    WORLD,
    Trained,
    compare,
    on_ranks,
    optimizers_of,
    rest_of,
    shard,
    train,
    train_whole,
)
from .packages import needs
from .test_language import BATCH, CASES, tokens_of

CASE = CASES["llama"]


class WithOwned(torch.optim.AdamW):
    """AdamW for everything else, whose step and `zero_grad` are also those of the owned optimizer: what a loop that
    knows one optimizer is given."""

    def __init__(self, params, owned_optimizer, **options):
        self.owned_optimizer = owned_optimizer
        super().__init__(params, **options)

    def step(self, closure=None):
        loss = super().step(closure)
        self.owned_optimizer.step()
        return loss

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.owned_optimizer.zero_grad(set_to_none)


class OwnedTrainer(transformers.Trainer):
    """Owned and sharded before, so nothing is wrapped; one norm over everything; checkpoints through DCP."""

    def __init__(self, owned, *args, **kwargs):
        self.owned, self.seen = owned, []
        super().__init__(*args, **kwargs)
        self.accelerator.prepare_model = lambda model, **_options: model

    def _clip_grad_norm(self, model):
        return self.owned.clip_grad_norm_(model, self.args.max_grad_norm)

    def _save_checkpoint(self, model, trial):
        adamw = self.optimizer.optimizer  # Accelerate wraps it
        state = {"model": model.state_dict(), "optimizer": optimizer_state(adamw.owned_optimizer)}
        folder = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        dist.checkpoint.save(state, checkpoint_id=folder)

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if self.model.training:
            self.seen.append(loss.item())
        return loss


def examples():
    rows = [row for step in range(STEPS) for rank in range(WORLD) for row in tokens_of(step, rank)]
    # The first token is no label of the shifted loss, but the Trainer would count it as one.
    return [{"input_ids": row, "labels": torch.cat((torch.tensor([-100]), row[1:]))} for row in rows]


def by_trainer(rank, _world, folder):
    model = CASE.build()
    owned = shard(CASE, model)
    adamw = WithOwned(rest_of(model, owned.parameters), owned.build_optimizer(MUON), **ADAMW.keywords)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        average_tokens_across_devices=False,  # the loss of a rank is then that of its batch; all have as many tokens
    )
    trainer = OwnedTrainer(
        owned, model, arguments, train_dataset=examples(), eval_dataset=examples(), optimizers=(adamw, None)
    )
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    saved = dist.checkpoint.FileSystemReader(f"{folder}/checkpoint-{STEPS}").read_metadata().state_dict_metadata
    result = Trained(trainer.seen, owned.masters(), []), evaluated, len(saved)
    owned.close()
    return result


@needs("accelerate")
def test_trainer(figures):
    whole = train_whole(dataclasses.replace(CASE, after=mean_loss))
    with tempfile.TemporaryDirectory() as folder:
        results = on_ranks(by_trainer, folder)
    figures(compare([trained for trained, _, _ in results], whole))
    model = CASE.build()
    for _, evaluated, saved in results:
        assert evaluated == pytest.approx(whole.after, rel=1e-5)
        owned = len(whole.weights)
        groups = len(MUON(list(model.parameters())[:1]).param_groups[0]) - 1
        assert saved == len(model.state_dict()) + owned * (1 + groups)


def mean_loss(model):
    model.eval()
    with torch.no_grad():
        losses = [CASE.loss_of(model, step, rank).item() for step in range(STEPS) for rank in range(WORLD)]
    return sum(losses) / len(losses)


def by_accelerate(rank, _world):
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import FullyShardedDataParallelPlugin

    model = CASE.build()
    owned = shard(CASE, model)
    optimizer, rest = optimizers_of(model, owned)
    accelerator = Accelerator(cpu=True)
    # What `Accelerator(fsdp_plugin=...)` sets on a GPU; on CPUs it would wrap the model in DistributedDataParallel.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    model, rest = accelerator.prepare(model, rest)  # not the owned optimizer: its parameters are no model's
    losses = train(CASE, model, owned, (optimizer, rest), rank, accelerator.backward)
    result = Trained(losses, owned.masters(), [])
    owned.close()
    return result


@needs("accelerate")
def test_accelerate(figures):
    figures(compare(on_ranks(by_accelerate), train_whole(CASE)))


def by_fabric(rank, _world):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    found = []

    def parallelize(model, _mesh):
        found.append(shard(CASE, model))
        return model

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=WORLD, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup(CASE.build())
    (owned,) = found
    optimizers = fabric.setup_optimizers(*optimizers_of(model, owned))
    losses = train(CASE, model, owned, optimizers, rank, fabric.backward)
    result = Trained(losses, owned.masters(), [])
    owned.close()
    return result


@needs("lightning")
def test_fabric(figures):
    figures(compare(on_ranks(by_fabric), train_whole(CASE)))
