"""Convolution weights as matrices [out, in * k * k]: through the runtime equal to one process, in the module's shape in
its state dict, with the learning-rate factor of the flattened shape; other weights of more dimensions are refused."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchtitan_dmuon as dmuon
from tests import toy
from tests.ranks import run_ranks

MUON = functools.partial(dmuon.Muon, lr=0.05, ns_dtype="float64", adjust_lr_fn="match_rms_adamw")


class Patches(nn.Module):
    """An image tower's beginning: two strided convolutions and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3, stride=2), nn.Conv1d(8, 6, 2, bias=False)])
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.convs[1](self.convs[0](x).tanh().flatten(2)).mean(-1))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def one_process(steps: int) -> dict[str, torch.Tensor]:
    model = Patches()
    weights = [conv.weight for conv in model.convs]
    flat = [nn.Parameter(w.detach().view(w.shape[0], -1)) for w in weights]  # the same memory
    matrix, rest = MUON(flat), torch.optim.SGD([p for p in model.parameters() if p.ndim < 3], lr=0.1)
    for step in range(steps):
        model.zero_grad()
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        for w, f in zip(weights, flat):
            f.grad = w.grad.view(f.shape)
        matrix.step()
        rest.step()
    return {f"convs.{i}.weight": w.detach().clone() for i, w in enumerate(weights)}


def owned_run(rank: int, world: int, steps: int):
    model, mesh = Patches(), toy.mesh_of(1, 2)
    owned = dmuon.own_matrices(model, mesh, select=r"convs\..*weight$", units=model.convs)
    for conv in model.convs:
        fully_shard(conv, mesh=mesh, ignored_params=owned.parameters)
    fully_shard(model, mesh=mesh, ignored_params=owned.parameters)
    matrix = owned.build_optimizer(MUON)
    rest = torch.optim.SGD([p for p in model.parameters() if p not in owned.parameters], lr=0.1)
    for step in range(steps):
        loss_of(model, step, rank).backward()
        matrix.step()
        rest.step()
        rest.zero_grad()
    state = {k: v for k, v in model.state_dict().items() if k in owned.names}
    model.load_state_dict(state, strict=False)  # of the module's own shape
    return toy.held(state), matrix.ns_calls, [m for p in owned.plan.pieces for m in p.matrices()]


def test_two_ranks_equal_one_process():
    expected = one_process(3)
    results = run_ranks(owned_run, 2, 3)
    found = {k: v for state, _, _ in results for k, v in state.items()}
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}
    start = Patches()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name
        assert (value - start.get_parameter(name)).norm() > 0.1 * value.norm()
    assert sum(calls for _, calls, _ in results) == 3 * 2
    assert results[0][2] == [(8, 27), (6, 16)]


@pytest.mark.parametrize(
    "module", [nn.Conv2d(4, 8, 3, groups=2), nn.ConvTranspose2d(4, 8, 3), nn.Conv1d(4, 8, 3, groups=4)]
)
def test_several_maps_in_one_weight_are_refused(module):
    model = nn.Sequential(module)
    with pytest.raises(ValueError, match=r"^0.weight has shape .* in Conv.*: it is no matrix"):
        dmuon.own_matrices(model, dmuon.runtime.rank_grid.RankGrid((0,), 1, "cpu"), select="weight", units=[module])
