"""Weights that are stored [inputs, outputs], as GPT-2's are: the update is that of their transposes, block by block."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchtitan_dmuon as dmuon
from tests.ranks import run_ranks
from torchtitan_dmuon.matrices import MatrixLayout, OwnedSpec, stores_inputs_first
from torchtitan_dmuon.muon import Muon, set_layout
from torchtitan_dmuon.titan.gather_muon import GatherMuon

DIM, LAYERS = 12, 3
FUSED = MatrixLayout(rows=(DIM, DIM, DIM), transposed=True)


class Conv1D(nn.Module):
    """As in transformers: x @ weight + bias, weight [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(0.3 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.c_fc = Conv1D(3 * DIM, DIM), Conv1D(DIM, DIM), Conv1D(4 * DIM, DIM)
        self.down = Conv1D(DIM, 4 * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        x = x + self.c_proj(q * torch.tanh(k) + v)
        return x + self.down(torch.tanh(self.c_fc(x)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


# --- the layout ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 4), max_size=3), st.integers(1, 5), st.sampled_from([None, 0.9]),
       st.sampled_from(["original", "match_rms_adamw", "spectral_unclamped"]), st.booleans())  # fmt: skip
def test_a_step_is_that_of_the_transposes_split_by_hand(groups, rows, n, row_beta, rule, cautious):
    layout = MatrixLayout(groups if rows else 1, tuple(rows), transposed=True)
    stored = MatrixLayout(layout.groups, layout.rows)
    m = layout.groups * sum(rows) if rows else 7
    torch.manual_seed(m + 31 * n)
    fused = nn.Parameter(torch.randn(n, m, dtype=torch.float64))
    set_layout(fused, layout)
    split = [nn.Parameter(part.clone().contiguous()) for part in stored.split(fused.detach().T)]
    options = dict(lr=0.1, ns_dtype="float64", row_beta=row_beta, adjust_lr_fn=rule, cautious_weight_decay=cautious)
    one, many = Muon([fused], **options), Muon(split, **options)
    for _ in range(3):
        fused.grad = torch.randn(n, m, dtype=torch.float64)
        for param, grad in zip(split, stored.split(fused.grad.T), strict=True):
            param.grad = grad.contiguous()
        one.step()
        many.step()
    assert layout.shapes(fused.shape) == tuple(tuple(p.shape) for p in split)
    for part, param in zip(layout.split(fused.detach()), split, strict=True):
        assert (part - param).norm() <= 1e-12 * param.norm()
    assert torch.equal(layout.join(layout.split(fused.detach())), fused)


def test_the_factor_is_of_outputs_over_inputs():
    """GPT-2's c_attn [768, 2304] by "original": sqrt(3), where [in, out] taken as it is would give 1."""
    plain, turned = (nn.Parameter(torch.zeros(16, 48)) for _ in range(2))
    set_layout(turned, MatrixLayout(transposed=True))
    for param in (plain, turned):
        param.grad = torch.randn(16, 48, generator=torch.Generator().manual_seed(0))
        Muon([param], lr=1.0, ns_dtype="float32").step()
    assert float(turned.norm() / plain.norm()) == pytest.approx(3**0.5, rel=1e-3)


@pytest.mark.parametrize(
    "layout, message",
    [
        (MatrixLayout(rows=(4, 4), transposed=True), r"cover 8 columns, but dim 1 has 12"),
        (MatrixLayout(groups=2, transposed=True), "groups without rows"),
    ],
)
def test_blocks_must_cover_the_columns(layout, message):
    with pytest.raises(ValueError, match=rf"^w: .*{message}"):
        OwnedSpec("w", (8, 12), layout)
    OwnedSpec("w", (8, 12), MatrixLayout(rows=(4, 8), transposed=True))
    (*_, last) = OwnedSpec("w", (3, 8, 12), MatrixLayout(rows=(4, 8), transposed=True)).pieces()
    assert last.matrices() == ((4, 8), (8, 8))


def _gathering(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return _steps(GatherMuon, lambda t: distribute_tensor(t, mesh, [Replicate(), Shard(0)]))


def _steps(cls, place):
    torch.manual_seed(0)
    param = nn.Parameter(place(torch.randn(DIM, 3 * DIM)))
    set_layout(param, FUSED)
    optimizer = cls([param], lr=0.1, row_beta=0.9, ns_dtype="float32")
    for _ in range(2):
        param.grad = place(torch.randn(DIM, 3 * DIM))
        optimizer.step()
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()


def test_gathered_shards_are_updated_alike():
    expected = _steps(Muon, lambda t: t)
    for got in run_ranks(_gathering, 4):
        assert (got - expected).norm() <= 1e-6 * expected.norm()


# --- what the structure of a module tells -------------------------------------------------------------------------


def holder(weight, bias=None, nf=None):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(weight))
    module.bias = None if bias is None else nn.Parameter(torch.zeros(bias))
    if nf is not None:
        module.nf = nf
    return module


@pytest.mark.parametrize(
    "module, told",
    [
        (Conv1D(8, 4), True), (Conv1D(4, 4), True), (Conv1D(4, 8), True),
        (nn.Linear(4, 8), False), (nn.Linear(4, 4), False), (nn.Linear(8, 4, bias=False), False),
        (nn.Embedding(8, 4), False), (nn.LayerNorm((4, 8)), False), (nn.Conv1d(4, 8, 3), False),
        (holder((4, 8), 8), True), (holder((8, 4), 8), False), (holder((4, 4), 4), False), (holder((4, 8)), False),
        (holder((4, 8), nf=4), False), (nn.Identity(), False),
    ],
)  # fmt: skip
def test_storage_is_told_by_structure_not_by_a_class_name(module, told):
    assert stores_inputs_first(module) is told


def _own(model, **options):
    mesh = init_device_mesh("cpu", (options.pop("replicas", 1), options.pop("shards", 1)), mesh_dim_names=("r", "s"))
    options = {"select": "weight$", "units": list(model), **options}
    return dmuon.own_matrices(model, mesh, **options)


def _train(rank, world):
    model = make()
    owned = _own(model, replicas=2, shards=2, layouts={"c_attn": FUSED}, ranks_per_node=2)
    for block in model:  # the biases
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
        fully_shard(block, mesh=mesh, ignored_params=owned.parameters)
    optimizer = owned.build_optimizer(dmuon.Muon, lr=0.05, ns_dtype="float32", row_beta=0.9)
    for step in range(2):
        model(_inputs(step)[rank]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(owned.masters())


def _inputs(step):
    return torch.randn(4, 16, DIM, generator=torch.Generator().manual_seed(step))


def test_owned_training_equals_one_process():
    model = make()
    weights = {n: p for n, p in model.named_parameters() if n.endswith("weight")}
    for name, param in weights.items():
        set_layout(param, FUSED if "c_attn" in name else MatrixLayout(transposed=True))
    optimizer = Muon(weights.values(), lr=0.05, ns_dtype="float32", row_beta=0.9)
    for step in range(2):
        (model(_inputs(step)).square().sum() / 4).backward()
        optimizer.step()
        model.zero_grad()
    owned = {key: value for each in run_ranks(_train, 4) for key, value in each.items()}
    assert len(owned) == 4 * LAYERS
    for name, param in weights.items():
        (got,) = [v for key, v in owned.items() if key.startswith(f"{name}[")]
        assert (got - param).norm() <= 1e-5 * param.norm(), name


def _refusals(rank, world):
    caught = []
    logging.getLogger("torchtitan_dmuon").addHandler(handler := logging.Handler())
    handler.emit = lambda record: caught.append(record.getMessage())
    owned = _own(make(), layouts={"c_attn": FUSED})
    specs = {s.name: s.layout for s in (param.spec for param in owned.owned_parameters())}
    said = []
    for options in (
        {"layouts": {"c_attn": MatrixLayout(rows=(4, 8))}},
        {"select": [OwnedSpec("0.c_proj.weight", (DIM, DIM))]},
    ):
        try:
            _own(make(), **options)
        except ValueError as error:
            said.append(str(error))
    owned.close()
    return caught, specs, said


def test_undeclared_storage_is_turned_and_told_and_a_layout_of_rows_is_refused():
    ((caught, specs, said),) = run_ranks(_refusals, 1)
    assert specs["1.c_attn.weight"] == FUSED and specs["1.c_fc.weight"] == MatrixLayout(transposed=True)
    (told,) = [m for m in caught if "stored [inputs, outputs]" in m]
    assert told.startswith("9 selected weights are stored [inputs, outputs]: 0.c_proj.weight ...")
    assert len(said) == 2 and all("its layout must have transposed=True" in s for s in said)
    assert said[0].startswith("0.c_attn.weight is stored") and said[1].startswith("0.c_proj.weight is stored")
