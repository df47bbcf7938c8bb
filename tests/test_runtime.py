"""What the runtime keeps true around the update: how often, where, in which order, and what survives what.

DESIGN invariants 2, 3, 5, 6, 7, 8 and 10, and the field cases that need a model and ranks. The models here have owned
weights only, so that memory and messages can be stated exactly.
"""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # noqa: F401  here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torchtitan_dmuon as dmuon
from torchtitan_dmuon import muon
from torchtitan_dmuon.runtime.wires import LogEntry, Logged
from torchtitan_dmuon.topology import SLOT_ELEMENTS

from . import toy
from .ranks import RankFailed, run_ranks

DIM = 8


class Layer(nn.Module):
    """up [16, 8] and down [8, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, idle: bool = False) -> torch.Tensor:
        return x if idle else x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """An input matrix of the root's own unit, and layers; each may be skipped, and a layer may be called and idle."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor, skip: tuple[str, ...] = ()) -> torch.Tensor:
        if "first" not in skip:
            x = x + self.first(x)
        for i, layer in enumerate(self.layers):
            if str(i) not in skip:
                x = layer(x, idle=f"idle {i}" in skip)
        return x


def tower(layers: int = 3, device: str = "cpu") -> Tower:
    torch.manual_seed(0)
    with torch.device(device):
        return Tower(layers)


def own(model: nn.Module, replicas: int, shards: int, per_node: int = 2, dtype=None, **options) -> dmuon.OwnedMatrices:
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options = {"select": r"weight$", "units": getattr(model, "layers", [model]), "ranks_per_node": per_node, **options}
    return dmuon.own_matrices(model, mesh, mp_policy=policy, **options)


make_muon = functools.partial(dmuon.Muon, lr=0.02, weight_decay=0.1, ns_dtype="float32", batch_bytes=0)


def inputs(seed: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def backward(model: nn.Module, seed: int, rank: int, **kwargs: Any) -> None:
    model(inputs(seed, rank), **kwargs).square().sum().backward()


def masters(owned: dmuon.OwnedMatrices) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in owned.masters().items()}


def merged(by_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Of all ranks; a piece on two ranks is an error."""
    assert sum(map(len, by_rank)) == len({k for each in by_rank for k in each})
    return {k: v for each in by_rank for k, v in each.items()}


def gathered_weights(model: nn.Module, owned: dmuon.OwnedMatrices) -> dict[str, torch.Tensor]:
    with owned.gathered():
        return {n: p.clone() for n, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- invariant 2: once per matrix ----


def _count_ns(rank: int, world: int) -> tuple[int, int, int, int]:
    model = toy.make_toy()
    owned = toy.shard(model, toy.mesh_of(2, 2), ranks_per_node=2, riders=r"norm\d|bias")
    matrix = owned.build_optimizer(functools.partial(make_muon, batch_bytes=2**20), riders=toy.adamw)
    calls = toy.counted_matrices()
    full_tensor = DTensor.full_tensor

    def no_matrix(self: DTensor, **kwargs: Any) -> torch.Tensor:  # the clip's norm is a scalar
        assert self.ndim == 0, f"full_tensor of {tuple(self.shape)}"
        return full_tensor(self, **kwargs)

    DTensor.full_tensor = no_matrix  # type: ignore[method-assign]
    for step in range(2):
        calls.clear()
        for micro in range(3):
            owned.set_is_last_backward(micro == 2)
            toy.loss_of(model, step, micro, rank).backward()
        owned.clip_grad_norm_(model, 1.0)
        with FlopCounterMode(display=False) as counter:
            matrix.step()
    settings = muon.settings_of(matrix.param_groups[0])
    pieces = [(p.shape, p.layout) for p in owned.plan.pieces if not p.rider]
    formula = muon.muon_flops(pieces, settings)
    matrices = sum(len(p.matrices()) for p in owned.plan.pieces)
    owned.close()
    return calls["matrices"], matrices, counter.get_total_flops(), formula


def test_newton_schulz_runs_once_per_matrix_and_step() -> None:  # CASES 1, 22
    counted = run_ranks(_count_ns, 4, ranks_per_node=2)
    _, matrices, _, formula = counted[0]
    assert matrices == 18
    assert sum(c for c, *_ in counted) == matrices
    assert sum(f for *_, f, _ in counted) == formula > 0
    assert max(f for *_, f, _ in counted) < formula  # not one rank doing all of it


# ---- invariant 3: bytes in the cluster ----


def live_bytes() -> int:
    """Bytes of all distinct storages that Python can reach; the compiler's fake tensors have none."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not isinstance(thing, FakeTensor) and thing.device.type == "cpu":
            if thing.layout != torch.strided:  # another test's: ours has none
                continue
            storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def _memory(rank: int, world: int, replicas: int, shards: int, options: dict[str, Any]) -> tuple[int, int, int, int]:
    before = live_bytes()
    model = tower(4, "meta")
    owned = own(model, replicas, shards, dtype=torch.bfloat16, **options)
    owned.initialize(lambda _name, t: nn.init.normal_(t, std=0.3))
    matrix = owned.build_optimizer(make_muon)
    for step in range(2):
        for micro in range(2):
            owned.set_is_last_backward(micro == 1)
            model(inputs(step, rank, torch.bfloat16)).square().sum().backward()
        owned.engine.finish_reduces()
        before_step = live_bytes() - before
        matrix.step()
    owned.engine.await_publishes()
    at_rest = live_bytes() - before
    numel = sum(p.numel for p in owned.plan.pieces)
    padded = sum((p.numel // SLOT_ELEMENTS + 1) * SLOT_ELEMENTS for p in owned.plan.pieces)
    owned.close()
    return at_rest, before_step, numel, padded


@pytest.mark.parametrize(
    ("replicas", "shards", "options", "cells"),
    [(2, 2, {}, 2), (1, 4, {}, 1), (1, 4, {"holders": "node"}, 2), (4, 1, {}, 4), (2, 2, {"prefetch": 2}, 2)],
)
def test_every_live_byte_of_the_cluster(replicas: int, shards: int, options: dict[str, Any], cells: int) -> None:
    found = run_ranks(_memory, 4, replicas, shards, options, ranks_per_node=2)
    numel, padded = found[0][2:]
    masters_, momenta, copies, gradients = 4 * padded, 4 * numel, 2 * cells * padded, 4 * padded
    assert sum(f[0] for f in found) == masters_ + momenta + copies
    assert sum(f[1] for f in found) == masters_ + momenta + copies + gradients


# ---- invariant 5: the same operations on every rank ----


SKIPPED = {
    "a layer": ("1",),
    "the root's own": ("first",),
    "all but one": ("first", "0", "2"),
    "idle layers": ("idle 1", "idle 2"),
}


def _log_of(rank: int, world: int, replicas: int, shards: int, uneven: str, options: dict[str, Any]) -> Any:
    """Messages of this rank by phase, over three steps of which some are uneven, and the final masters."""
    model = tower()
    owned = own(model, replicas, shards, **options)
    log: list[LogEntry] = []
    wires = owned.engine.transport.wires
    for phase, inner in wires.items():
        wires[phase] = Logged(phase, log, inner)
    matrix = owned.build_optimizer(make_muon)
    for step in range(3):
        for micro in range(2):
            owned.set_is_last_backward(micro == 1)
            skip: tuple[str, ...] = ()
            if rank == 1 and (step > 0 or uneven.startswith("at once")):
                skip = SKIPPED.get(uneven.removeprefix("at once, "), ())
                if uneven == "delayed":
                    time.sleep(0.2)
            backward(model, 10 * step + micro, rank, skip=skip)
        with torch.no_grad():
            model(inputs(99, rank))
        matrix.step()
    owned.engine.await_publishes()
    by_phase = {p: [entry for entry in log if entry[0] == p] for p in wires}
    result = by_phase, masters(owned)
    owned.close()
    return result


@functools.cache
def _even(replicas: int, shards: int, reshard: bool) -> list[Any]:
    return run_ranks(_log_of, 4, replicas, shards, "nothing", {"reshard_after_forward": reshard}, ranks_per_node=2)


UNEVEN = [*SKIPPED, "delayed", "at once, a layer", "at once, idle layers"]


@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize(("replicas", "shards", "reshard"), [(2, 2, True), (1, 4, False)])
def test_a_rank_that_skips_units_issues_the_same_messages(replicas, shards, reshard, uneven) -> None:
    options = {"reshard_after_forward": reshard}
    even = _even(replicas, shards, reshard)
    logs = run_ranks(_log_of, 4, replicas, shards, uneven, options, ranks_per_node=2, limit=20)
    for rank in range(4):
        for phase, messages in even[rank][0].items():
            assert logs[rank][0][phase] == messages, f"rank {rank}, {phase}"
    assert same(merged([m for _, m in logs]), merged([m for _, m in even])) == (uneven == "delayed")


def _owns_nothing(rank: int, world: int) -> tuple[dict[str, torch.Tensor], int, list[int]]:
    model = tower(1)
    owned = own(model, 2, 2, select=r"layers\.0\.(up|down)")
    matrix = owned.build_optimizer(make_muon, groups=[(lambda n: "up" in n, {"lr": 0.1}), (lambda n: True, {})])
    for step in range(2):
        backward(model, step, rank)
        owned.clip_grad_norm_(model, 1.0)
        matrix.step()
    saved = {k: v.clone() for k, v in toy.held(model.state_dict()).items() if "layers" in k}
    matrix.load_state_dict(matrix.state_dict())
    owned.close()
    return saved, len(owned.masters()), [len(g["params"]) for g in matrix.param_groups]


def test_ranks_that_own_nothing_build_step_and_save() -> None:  # CASES 15
    found = run_ranks(_owns_nothing, 4, ranks_per_node=2)
    assert sorted(n for _, n, _ in found) == [0, 0, 1, 1]
    assert sorted(g for _, _, g in found) == [[0, 0], [0, 0], [0, 1], [1, 0]]
    assert merged([s for s, *_ in found]).keys() == {"layers.0.up.weight", "layers.0.down.weight"}


def _unused(rank: int, world: int) -> list[str]:
    """A weight that one rank uses gets that rank's gradient; one that nobody uses is not touched, not even decayed."""
    model = tower()
    owned = own(model, 1, 2)
    matrix = owned.build_optimizer(make_muon)
    before = masters(owned)
    backward(model, 0, rank, skip=("1",) if rank else ("1", "2"))
    owned.engine.finish_reduces()
    assert owned.engine.gradients_are_finite()
    grads = {k: p.grad for u in owned.engine.units for k, p in u.master_of.items()}
    matrix.step()
    after = masters(owned)
    wrong = [k for k, g in grads.items() if (g is None) != ("layers.1" in k)]
    wrong += [k for k in after if torch.equal(before[k], after[k]) != ("layers.1" in k)]
    owned.close()
    return wrong


def test_a_weight_nobody_used_is_left_alone() -> None:
    assert run_ranks(_unused, 2) == [[], []]


# ---- invariant 6: one plan ----


def _other_plan(rank: int, world: int, options: list[dict[str, Any]]) -> str:
    try:
        own(tower(), 2, 2, **options[rank])
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"balance": "round_robin"}, "options.balance: 'cost' against 'round_robin'"),
        ({"select": "down"}, "first.weight"),
    ],
)
def test_ranks_with_another_plan_stop_and_say_what_differs(change: dict[str, Any], shown: str) -> None:
    for message in run_ranks(_other_plan, 4, [{}, {}, change, {}], ranks_per_node=2, limit=20):
        assert "ranks 0 and 2 of the data-parallel group derived different ownership plans" in message
        assert shown in message


# ---- invariants 7 and 8: start from meta ----


def _initial(rank: int, world: int, replicas: int, shards: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = tower(device="meta")
    owned = own(model, replicas, shards, **options)
    owned.initialize(lambda _name, t: nn.init.trunc_normal_(t, std=0.1), seed=7)
    found = masters(owned)
    weights = gathered_weights(model, owned)
    for key, value in found.items():
        assert torch.equal(weights[key.partition("[")[0]], value)
    owned.close()
    return found


def test_initial_weights_depend_on_neither_world_size_nor_plan() -> None:
    alone = run_ranks(_initial, 1, 1, 1, {})[0]
    assert len(alone) == 7 and len({v.sum().item() for v in alone.values()}) == 7
    for replicas, shards, options in (
        (1, 2, {}),
        (2, 1, {"balance": "round_robin"}),
        (2, 2, {"balance": "numel", "holders": "node"}),
        (1, 4, {"balance": "round_robin", "routing": "flat"}),
    ):
        found = run_ranks(_initial, replicas * shards, replicas, shards, options, ranks_per_node=2)
        assert same(merged(found), alone), (replicas, shards, options)


def _before_values(rank: int, world: int) -> None:
    model = tower(device="meta")
    owned = own(model, 1, 2)
    with pytest.raises(RuntimeError, match=r"has no values yet \(7 such parameters\): call owned.initialize, or load"):
        model(inputs(0, rank))
    owned.initialize(lambda _name, t: nn.init.normal_(t))
    model(inputs(0, rank))
    owned.close()


def test_a_forward_before_there_are_values_says_so() -> None:
    run_ranks(_before_values, 2)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made under this mode held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.device.type == "cpu":
                self.tensors.append(weakref.ref(t))
        self.tensors = [r for r in self.tensors if r() is not None]
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for r in self.tensors if (t := r()) is not None
        }
        self.peak = max(self.peak, sum(storages.values()))
        return out


def _peak(rank: int, world: int, shards: int) -> tuple[int, int]:
    model = tower(12, "meta")
    with Peak() as peak:
        owned = own(model, world // shards, shards, dtype=torch.bfloat16)
        owned.initialize(lambda _name, t: nn.init.normal_(t))
        state = model.state_dict()
        model.load_state_dict(state, strict=False)
    total = 4 * sum(p.numel for p in owned.plan.pieces)
    owned.close()
    return peak.peak, total


def test_no_rank_ever_holds_all_owned_parameters() -> None:
    for peak, total in run_ranks(_peak, 4, 4, ranks_per_node=2):
        assert 0 < peak < total / 2
    peak, total = run_ranks(_peak, 1, 1)[0]
    assert peak >= total  # the measure sees what one rank that owns everything holds


# ---- invariant 10: nothing changes without a sound step ----


def _inf(rank: int, world: int, clip: bool) -> list[str]:
    model = tower()
    owned = own(model, 2, 2)
    matrix = owned.build_optimizer(make_muon)
    wrong: list[str] = []

    def state() -> dict[str, torch.Tensor]:
        momenta = {f"{i}.{k}": v.clone() for i, s in enumerate(matrix.state.values()) for k, v in s.items()}
        return masters(owned) | momenta

    def step(seed: int) -> None:
        if clip:
            owned.clip_grad_norm_(model, 1.0)
        matrix.step()

    backward(model, 0, rank)
    step(0)
    before = state()
    x = inputs(1, rank)
    if rank == 3:
        x[0, 0] = float("inf")
    model(x).square().sum().backward()
    if not same(before, state()):
        wrong.append("a backward changed weights or momentum")
    step(1)
    if not same(before, state()):
        wrong.append("a step with an inf on one rank changed weights or momentum")
    if matrix.skipped_steps != 1:
        wrong.append(f"{matrix.skipped_steps} skipped steps")
    backward(model, 2, rank)
    step(2)
    after = state()
    if any(torch.equal(before[k], after[k]) for k in after) or not all(v.isfinite().all() for v in after.values()):
        wrong.append("the next step is not normal")
    final = masters(owned)
    owned.close()
    return wrong or [final]  # type: ignore[list-item]


def _without_inf(rank: int, world: int, clip: bool) -> dict[str, torch.Tensor]:
    model = tower()
    owned = own(model, 2, 2)
    matrix = owned.build_optimizer(make_muon)
    for seed in (0, 2):
        backward(model, seed, rank)
        if clip:
            owned.clip_grad_norm_(model, 1.0)
        matrix.step()
    final = masters(owned)
    owned.close()
    return final


@pytest.mark.parametrize("clip", [True, False])
def test_an_inf_on_one_rank_changes_nothing_anywhere(clip: bool) -> None:  # CASES 10
    found = run_ranks(_inf, 4, clip, ranks_per_node=2)
    for (final,) in found:
        assert isinstance(final, dict), final
    # As if the bad step had not been: nothing of it is left in a sum or a buffer.
    assert same(merged([f for (f,) in found]), merged(run_ranks(_without_inf, 4, clip, ranks_per_node=2)))


# ---- field cases ----


class Odd(nn.Module):
    """Matrices (3, 8), (5, 7), (1, 16), (18, 64) in one unit."""

    SHAPES = ((3, 8), (5, 7), (1, 16), (18, 64))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.ParameterList(nn.Parameter(torch.randn(s)) for s in self.SHAPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((w * x[: w.shape[0], : w.shape[1]]).square().sum() for w in self.w)


def _odd(rank: int, world: int) -> dict[str, torch.Tensor]:
    model = Odd()
    owned = own(model, 2, 2, select=r"w\.\d")
    matrix = owned.build_optimizer(make_muon)
    for step in range(3):
        model(torch.randn(18, 64, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        matrix.step()
    found = masters(owned)
    owned.close()
    return found


def test_odd_and_tiny_shapes() -> None:  # CASES 13
    found = merged(run_ranks(_odd, 4, ranks_per_node=2, limit=20))
    model = Odd()
    matrix = make_muon(list(model.w))
    for step in range(3):
        for rank in range(4):
            (model(torch.randn(18, 64, generator=torch.Generator().manual_seed(10 * step + rank))) / 4).backward()
        matrix.step()
        matrix.zero_grad()
    for i, w in enumerate(model.w):
        assert (found[f"w.{i}[000000]"] - w).norm() <= 1e-5 * w.norm(), w.shape


def _factor(rank: int, world: int, rule: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64, bias=False))
    owned = own(model, 1, 8, per_node=4)
    kwargs = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": rule, "ns_coefficients": "you"}
    matrix = owned.build_optimizer(functools.partial(make_muon, **kwargs))
    before = masters(owned)
    g = torch.Generator().manual_seed(rank)
    model(torch.randn(32, 16, generator=g)).square().sum().backward()
    matrix.step()
    found = {k: v - before[k] for k, v in masters(owned).items()}
    owned.close()
    return found


@pytest.mark.parametrize(("rule", "factor"), [("original", 2.0), ("match_rms_adamw", 1.6)])
def test_learning_rate_factor_is_of_the_whole_matrix(rule: str, factor: float) -> None:  # CASES 8
    (update,) = merged(run_ranks(_factor, 8, rule, ranks_per_node=4)).values()  # [64, 16]: 4:1, as [4096, 1024]
    singular = torch.linalg.svdvals(update)
    assert singular.shape == (16,) and (singular / factor - 1).abs().max() < 0.06


def _odds_and_ends(rank: int, world: int) -> list[str]:
    """Situations around steps; each ends where the plain run ends."""

    def run(around: Callable[[nn.Module, dmuon.OwnedMatrices, torch.optim.Optimizer, int], None], **options: Any):
        model = tower()
        owned = own(model, 2, 1, per_node=1, **options)
        matrix = owned.build_optimizer(make_muon)
        for step in range(3):
            around(model, owned, matrix, step)
            backward(model, step, rank)
            owned.clip_grad_norm_(model, 1.0)
            matrix.step()
        around(model, owned, matrix, 3)
        found = masters(owned), gathered_weights(model, owned)
        owned.close()
        return found

    def save(model: nn.Module, *_: Any) -> None:
        model.state_dict()

    def evaluate(model: nn.Module, *_: Any) -> None:
        model.eval()
        with torch.no_grad():
            model(inputs(50, rank))
        model.train()

    def step_twice(_model: nn.Module, _owned: Any, matrix: torch.optim.Optimizer, step: int) -> None:
        if step:
            matrix.step()

    def dropped_by_optimizer(model: nn.Module, _owned: Any, matrix: torch.optim.Optimizer, _step: int) -> None:
        backward(model, 60, rank)
        matrix.zero_grad()

    def dropped_by_model(model: nn.Module, *_: Any) -> None:
        backward(model, 60, rank)
        model.zero_grad(set_to_none=False)

    def dropped_before_the_last(model: nn.Module, owned: dmuon.OwnedMatrices, *_: Any) -> None:
        owned.set_is_last_backward(False)
        backward(model, 60, rank)
        owned.set_is_last_backward(True)
        model.zero_grad()

    def read(model: nn.Module, owned: dmuon.OwnedMatrices, *_: Any) -> None:
        with owned.gathered():
            model.layers[0].up.weight[:3].sum()

    def publish_again(_model: nn.Module, owned: dmuon.OwnedMatrices, *_: Any) -> None:
        owned.publish()

    def reload(model: nn.Module, *_: Any) -> None:
        state = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(state)

    def cast_and_move(model: nn.Module, *_: Any) -> None:
        model.to("cpu", torch.float64)
        model.float()

    plain = run(lambda *_: None)
    wrong = []
    arounds = (save, evaluate, step_twice, dropped_by_optimizer, dropped_by_model, dropped_before_the_last, read)
    for around in (*arounds, publish_again, reload, cast_and_move):
        for options in ({}, {"reshard_after_forward": False, "publish": "sync"}):
            found = run(around, **options)
            if not (same(found[0], plain[0]) and same(found[1], plain[1])):
                wrong.append(f"{around.__name__} {options}")
    return wrong


def test_what_may_happen_around_steps_changes_nothing() -> None:  # CASES 16
    assert run_ranks(_odds_and_ends, 2, ranks_per_node=1) == [[], []]


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        self.seen = {"x": x.dtype, "table": table.dtype, "weight": self.proj.weight.dtype}
        return self.proj(x) * table


def _rope(rank: int, world: int) -> dict[str, torch.dtype]:
    model = Rope()
    owned = own(model, 1, 1, dtype=torch.bfloat16)
    out = model(torch.ones(2, DIM, dtype=torch.bfloat16), table=torch.ones(2, DIM))
    assert out.dtype == torch.float32
    owned.close()
    return model.seen


def test_inputs_are_not_cast() -> None:  # CASES 18
    assert run_ranks(_rope, 1) == [{"x": torch.bfloat16, "table": torch.float32, "weight": torch.bfloat16}]


def _load(rank: int, world: int, replicas: int, shards: int) -> list[str]:
    model = tower()
    owned = own(model, replicas, shards)
    matrix = owned.build_optimizer(make_muon)
    backward(model, 0, rank)
    matrix.step()
    old = gathered_weights(model, owned)
    state = {k: v.clone() for k, v in toy.held(model.state_dict()).items()}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, state)
    owners = [k for each in everyone for k in each]
    wrong = []
    if sorted(owners) != sorted(n for n, _ in tower().named_parameters()):
        wrong.append(f"not one owner for each key: {sorted(owners)}")
    new = {n: p.detach() + 1 for n, p in tower().named_parameters()}
    model.load_state_dict(new)
    weights = gathered_weights(model, owned)  # before any forward
    if not same(weights, new):
        wrong.append("gathered weights are not the loaded ones")
    model.load_state_dict(old)
    y = model(inputs(5, rank))
    ordinary = tower()
    ordinary.load_state_dict(old)
    if not torch.equal(y, ordinary(inputs(5, rank))):
        wrong.append("the forward after a load is not the loaded model's")
    for key in ("first.weight", "layers.1.up.weight"):  # whoever owns it, all ranks say so
        for bad, message in (({**old, key: torch.zeros(3, 3)}, "size mismatch"), ({}, "Missing key")):
            try:
                model.load_state_dict(bad)
            except RuntimeError as error:
                if message not in str(error) or key not in str(error):
                    wrong.append(f"load says: {error}")
            else:
                wrong.append(f"a load with a {message} passes")
    owned.close()
    return wrong


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (1, 4)])
def test_state_has_one_owner_per_key_and_a_load_reaches_every_holder(replicas: int, shards: int) -> None:  # CASES 21
    assert run_ranks(_load, 4, replicas, shards, ranks_per_node=2) == [[]] * 4


def _replica(rank: int, world: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    model = tower()
    owned = own(model, 2, 2, ownership="replica")
    matrix = owned.build_optimizer(make_muon)
    for step in range(3):
        backward(model, step, rank)
        owned.clip_grad_norm_(model, 1.0)
        matrix.step()
    found = masters(owned), sorted(toy.held(model.state_dict()))
    owned.close()
    return found


def _global(rank: int, world: int) -> dict[str, torch.Tensor]:
    model = tower()
    owned = own(model, 2, 2)
    matrix = owned.build_optimizer(make_muon)
    for step in range(3):
        backward(model, step, rank)
        owned.clip_grad_norm_(model, 1.0)
        matrix.step()
    found = masters(owned)
    owned.close()
    return found


def test_replica_ownership_trains_the_same_weights_in_every_replica() -> None:
    found = run_ranks(_replica, 4, ranks_per_node=2)
    one, other = merged([m for m, _ in found[:2]]), merged([m for m, _ in found[2:]])
    assert same(one, other)
    assert same(one, merged(run_ranks(_global, 4, ranks_per_node=2)))
    names = sorted(n for n, _ in tower().named_parameters())
    assert all(sorted(k for _, keys in replica for k in keys) == names for replica in (found[:2], found[2:]))


def _hangs(rank: int, world: int) -> None:
    model = tower()
    owned = own(model, 1, 2)
    if rank == 0:
        model(inputs(0, rank))
    else:
        time.sleep(30)
    owned.close()


def test_a_hang_would_be_seen() -> None:
    with pytest.raises(RankFailed, match="still ran"):
        run_ranks(_hangs, 2, limit=3)


# ---- riders ----


def _fsdp_collectives(rank: int, world: int, riders: str | None) -> Counter[str]:
    """What FSDP2 itself sends in one forward and backward, with blocks given to `fully_shard` as TorchTitan does."""
    model = toy.make_toy()
    owned = toy.shard(model, toy.mesh_of(2, 2), ranks_per_node=2, riders=riders)
    toy.loss_of(model, 0, 0, rank).backward()  # the first pass learns the order
    owned.engine.drop_gradients()
    seen: list[str] = []

    class Watch(TorchDispatchMode):  # sees this thread alone: not the lanes' messages
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                seen.append(func.__name__.partition(".")[0].strip("_"))
            return func(*args, **(kwargs or {}))

    with Watch():
        toy.loss_of(model, 1, 0, rank).backward()
    owned.close()
    return Counter(seen)


def test_fsdp2_sends_nothing_for_blocks_whose_small_parameters_ride() -> None:
    without, with_ = (run_ranks(_fsdp_collectives, 4, r, ranks_per_node=2)[0] for r in (None, r"norm\d|bias"))
    alone = {"allgather_base": 1, "reduce_scatter_base": 1, "allreduce": 1}  # embedding, last norm and head
    assert with_ == alone
    assert without == {"allgather_base": 1 + 2 * 3, "reduce_scatter_base": 1 + 3, "allreduce": 1 + 3}
