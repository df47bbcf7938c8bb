"""Any optimizer over whole matrices: four ranks equal one process to the last bit, also one that counts steps in its
groups and keeps matrices in its state (SOAP), and also after a resume on another mesh."""

from __future__ import annotations

import functools
import pkgutil
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_dmuon.checkpoint import load_optimizer_state, optimizer_state

from .ranks import run_ranks
from .test_runtime import backward, inputs, merged, own, tower

STEPS = 6
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch.optim.AdamW": {"lr": 0.02, "weight_decay": 0.1},
    "torch.optim.Muon": {"lr": 0.02, "weight_decay": 0.1},
    # They count steps in their groups, and change their bases or roots in every other step.
    "pytorch_optimizer.SOAP": {"lr": 0.02, "precondition_frequency": 2},
    "pytorch_optimizer.Shampoo": {"lr": 0.02, "preconditioning_compute_steps": 2},
}


def made(path: str) -> functools.partial:
    package = path.partition(".")[0]
    if package != "torch":
        pytest.importorskip(package, reason=f"{package} is not installed; it is part of the extra `dev`")
    return functools.partial(pkgutil.resolve_name(path), **OPTIMIZERS[path])


def one_process(factory: functools.partial) -> dict[str, torch.Tensor]:
    """The gradients of four virtual ranks, summed as two nodes of two ranks do."""
    model = tower()
    optimizer = factory(list(model.parameters()))
    for step in range(STEPS):
        grads = []
        for rank in range(4):
            model.zero_grad()
            backward(model, step, rank)
            grads.append([p.grad for p in model.parameters()])
        for p, a, b, c, d in zip(model.parameters(), *grads):
            p.grad = ((a + b) + (c + d)) / 4
        optimizer.step()
    return {f"{n}[000000]": p.detach() for n, p in model.named_parameters()}


def _train(rank: int, world: int, factory: functools.partial, shape: tuple[int, int], path: str) -> Any:
    """On four ranks: from the start, saving after half of the steps. On others: the second half, from there."""
    model = tower()
    owned = own(model, *shape)
    optimizer = owned.build_optimizer(factory)
    begin = 0
    if world != 4:
        state = {"model": model.state_dict(), "optimizer": optimizer_state(optimizer)}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"], strict=False)
        load_optimizer_state(optimizer, state["optimizer"])
        begin = STEPS // 2
    for step in range(begin, STEPS):
        if step == STEPS // 2 and world == 4:
            dcp.save({"model": model.state_dict(), "optimizer": optimizer_state(optimizer)}, checkpoint_id=path)
        for virtual in range(rank * 4 // world, (rank + 1) * 4 // world):
            loss = model(inputs(step, virtual)).square().sum() * world / 4
            loss.backward()
        optimizer.step()
    found = {k: v.clone() for k, v in owned.masters().items()}
    owned.close()
    return found


@pytest.mark.parametrize("path", OPTIMIZERS)
def test_four_ranks_equal_one_process_also_resumed_on_two(path: str, tmp_path) -> None:
    factory = made(path)
    expected = one_process(factory)
    found = merged(run_ranks(_train, 4, factory, (2, 2), str(tmp_path / "half"), ranks_per_node=2))
    assert found.keys() == expected.keys()
    start = dict(tower().named_parameters())
    for key, value in expected.items():
        assert torch.equal(found[key], value), (key, (found[key] - value).norm() / value.norm())
        assert (value - start[key.partition("[")[0]]).norm() > 0.01
    resumed = merged(run_ranks(_train, 2, factory, (1, 2), str(tmp_path / "half"), ranks_per_node=2))
    for key, value in expected.items():  # sums over ranks and micro-batches come in another order
        assert (resumed[key] - value).norm() <= 1e-5 * value.norm(), key
