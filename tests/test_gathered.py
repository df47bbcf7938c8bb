"""`with owned.gathered():` as a place to work in: every operation, at every place around and inside a block.

An operation in a block does what it does without one, or is refused by name on all ranks alike, and then has changed
nothing. Either way the weights are shown until the block ends, none is left after it, and the next training step is
that of a model on which the operation was called without a block (or never, where it was refused).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.runtime.gathered_block import fingerprint

from . import toy
from .ranks import run_ranks
from .test_hooks import left_gathered

DIM = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        nn.init.normal_(self.norm.bias)
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down_EMN = nn.Parameter(torch.randn(2, DIM, DIM) * 0.3)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        if fail:
            raise ValueError("planted")
        return x + torch.einsum("ben,emn->bm", h.unflatten(-1, (2, DIM)), self.down_EMN)


class Model(nn.Module):
    """A matrix of the root's unit, tied to one of a layer; layers with a stack and riders."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.last = nn.Linear(DIM, DIM, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, **switches: Any) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, **switches)
        return self.last(x)

    def generate(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self(x)
        return x


class Bench:
    """A model with owned weights and its optimizer, and what operations have returned."""

    def __init__(self, rank: int, shape: tuple[int, int], dtype: torch.dtype | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank, self.model = rank, Model()
        self.owned = dmuon.own_matrices(
            self.model,
            init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")),
            select=r"weight$|down_EMN",
            units=self.model.layers,
            stacks="down_EMN",
            riders="norm",
            ranks_per_node=shape[1],
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
            **options,
        )
        self.optimizer = self.owned.build_optimizer(
            functools.partial(dmuon.Muon, lr=0.02, ns_dtype="float32"), riders=toy.adamw
        )
        self.dtype = dtype or torch.float32
        self.start = self.masters()
        self.restore()

    def restore(self) -> None:
        """As it was made: one model serves a whole table, since each has process groups with threads of their own."""
        self.seed, self.kept = 0, list[torch.Tensor]()
        self.owned.engine.free_all()
        self.optimizer.zero_grad()
        for inner in self.optimizer.inners:
            inner.state.clear()
        for key, master in self.owned.masters().items():
            master.copy_(self.start[key])
        self.owned.mark_stale()
        self.model.requires_grad_(True)
        self.owned.set_is_last_backward(True)

    def x(self) -> torch.Tensor:
        self.seed += 1
        return torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * self.seed + self.rank)).to(self.dtype)

    def masters(self) -> dict[str, torch.Tensor]:
        return {key: master.clone() for key, master in self.owned.masters().items()}

    def train(self) -> None:
        self.model(self.x()).square().sum().backward()
        self.owned.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()

    def require_shown(self) -> None:
        """Every weight is there: what this rank owns of it is its master in compute dtype, and all can be read."""
        for param in self.owned.owned_parameters():
            for module, attribute in param.slots:
                assert module._parameters[attribute] is param.weight, f"{param.name} is not shown"
            assert param.weight.sum().isfinite()

    def require_hidden(self) -> None:
        assert not (wrong := left_gathered(self.owned)), wrong


# ---- operations ----

REFUSED = "inside `with owned.gathered\\(\\):` would leave the weights shown there behind"
PENDING = r"inside `with owned.gathered\(write=True\):` would not have what was changed"
Operation = Callable[[Bench], None]
OPERATIONS: dict[str, Operation] = {}
REFUSALS: dict[str, str] = {}  # of those that are refused in any block
IN_BLOCKS_ONLY: set[str] = set()  # of those that a model without a block cannot do


def operation(f: Operation) -> Operation:
    OPERATIONS[f.__name__] = f
    return f


def refused(f: Operation) -> Operation:
    REFUSALS[f.__name__] = REFUSED
    return operation(f)


def in_blocks_only(f: Operation) -> Operation:
    IN_BLOCKS_ONLY.add(f.__name__)
    return operation(f)


@operation
def forward(b):
    with torch.no_grad():
        b.kept += [b.model(b.x()), b.model(b.x())]


@operation
def forward_of_a_unit(b):
    with torch.no_grad():
        b.kept.append(b.model.layers[1](b.x()))


@operation
def generate(b):
    with torch.no_grad():
        b.kept.append(b.model.generate(b.x(), 3))


@operation
def forward_in_inference_mode(b):
    with torch.inference_mode():
        b.kept.append(b.model(b.x()).clone())


@operation
def evaluation(b):
    b.model.eval()
    with torch.no_grad():
        b.kept.append(b.model(b.x()))
    b.model.train()


@operation
def forward_that_raises(b):
    for _ in range(2):
        with contextlib.suppress(ValueError):
            b.model(b.x(), fail=True)


@in_blocks_only
def forwards_as_each_rank_likes(b):
    with torch.no_grad():
        for _ in range(b.rank):
            b.model(torch.ones(2, DIM, dtype=b.dtype))
        if b.rank == 1:
            b.model.layers[1](torch.ones(2, DIM, dtype=b.dtype))


@in_blocks_only
def reading(b):
    b.kept += [b.model.first.weight.clone(), b.model.layers[1].down_EMN[1, 2:].clone(), b.model.layers[0].norm.bias + 1]


@operation
def a_block(b):
    with b.owned.gathered():
        b.kept.append(b.model.layers[0].up.weight.clone())


@operation
def a_block_that_raises(b):
    with contextlib.suppress(ValueError), b.owned.gathered():
        raise ValueError("planted")


@operation
def backward_of_an_earlier_forward(b):
    b.loss.backward()


@operation
def forward_and_backward(b):
    with torch.enable_grad():
        b.model(b.x()).sum().backward()


@operation
def accumulation(b):
    b.owned.set_is_last_backward(False)
    with torch.enable_grad():
        b.model(b.x()).sum().backward()
        b.owned.set_is_last_backward(True)
        b.model(b.x()).sum().backward()


@operation
def gradient_of_the_input(b):
    with torch.enable_grad():
        x = b.x().requires_grad_()
        b.kept += torch.autograd.grad(b.model(x).sum(), x)


@operation
def zero_grad_of_the_model(b):
    b.model.zero_grad()


@operation
def zero_grad_of_the_optimizer(b):
    b.optimizer.zero_grad()


@operation
def clip(b):
    b.kept.append(b.owned.clip_grad_norm_(b.model, 0.1))


@operation
def masters(b):
    b.kept += b.masters().values()


@operation
def optimizer_state(b):
    b.optimizer.load_state_dict(copy.deepcopy(b.optimizer.state_dict()))


@operation
def casts_and_moves(b):
    b.model.to("cpu").float()


@operation
def freezing(b):
    b.model.layers[0].up.weight.requires_grad_(False)


@operation
def state_dict(b):
    for value in b.model.state_dict().values():
        b.kept += [part.clone() for part in getattr(value, "parts", {0: value}).values()]


@operation
def full_state_dict(b):
    b.kept += b.owned.full_state_dict().values()


@refused
def load_state_dict(b):
    b.model.load_state_dict({"layers.0.up.weight": torch.ones(2 * DIM, DIM)}, strict=False)


@refused
def load_state_dict_of_a_part(b):
    b.model.layers[0].up.load_state_dict({"weight": torch.ones(2 * DIM, DIM)}, strict=False)


@refused
def fill(b):
    b.owned.fill("layers.0.down_EMN", lambda piece: torch.ones(DIM, DIM))


@refused
def initialize(b):
    b.owned.initialize(lambda _name, tensor: tensor.normal_(std=0.3), seed=3)


@refused
def initialize_one(b):
    b.owned.initialize_one("first.weight", lambda tensor: tensor.normal_(std=0.3), seed=3)


@refused
def publish(b):
    b.owned.publish()


@refused
def step(b):
    b.optimizer.step()


@refused
def step_with_a_closure(b):
    def closure() -> torch.Tensor:
        b.kept.append(torch.ones(()))
        b.model(b.x()).sum().backward()
        return torch.zeros(())

    b.optimizer.step(closure)


# ---- where they are called ----

Place = Callable[[Bench], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def inside(b: Bench, write: bool = False) -> Iterator[None]:
    with b.owned.gathered(write=write):
        yield


@contextlib.contextmanager
def nested(b: Bench, outer: bool = False, inner: bool = False) -> Iterator[None]:
    with b.owned.gathered(write=outer):
        with b.owned.gathered(write=inner):
            yield
        b.require_shown()


@contextlib.contextmanager
def between(b: Bench) -> Iterator[None]:
    """After an inner block has ended."""
    with b.owned.gathered():
        with b.owned.gathered():
            b.model(b.x())
        yield


@contextlib.contextmanager
def after(b: Bench) -> Iterator[None]:
    with b.owned.gathered():
        b.model(b.x())
    yield


PLACES: dict[str, Place] = {
    "inside": inside,
    "nested": nested,
    "between": between,
    "after": after,
    "inside, to write": functools.partial(inside, write=True),
    "nested, the outer one to write": functools.partial(nested, outer=True),
    "nested, the inner one to write": functools.partial(nested, inner=True),
}


def outcome(b: Bench, name: str, place: Place | None, shown: bool = True, called: bool = True, error: str = "") -> Any:
    """What was kept, and the masters after the operation and the step behind it."""
    b.restore()
    b.model(b.x()).square().sum().backward()
    b.loss = b.model(b.x()).square().sum()
    seed = b.seed
    with place(b) if place else contextlib.nullcontext():
        b.seed = seed
        if called:
            with pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext():
                OPERATIONS[name](b)
        if place and shown:
            b.require_shown()
    b.seed = 50
    if place and shown:
        b.require_hidden()
    kept = [*b.kept, *b.masters().values()]
    b.train()
    b.require_hidden()
    return [*kept, *b.masters().values()]


def table(
    rank: int, world: int, shape: tuple[int, int], places: list[str], options: dict[str, Any]
) -> tuple[list[str], int]:
    """(what differs, the number of pairs tried)"""
    wrong, tried = [], 0
    b = Bench(rank, shape, **options)
    without = outcome(b, "", None, called=False)
    for name in OPERATIONS:
        plain = None if name in IN_BLOCKS_ONLY else outcome(b, name, None)
        for where in places:
            if name in IN_BLOCKS_ONLY and where == "after":
                continue
            error = "" if where == "after" else REFUSALS.get(name, "")
            if "to write" in where and name in ("state_dict", "full_state_dict"):
                error = PENDING
            tried += 1
            try:
                found = outcome(b, name, PLACES[where], shown=where != "after", error=error)
            except Exception as failure:
                wrong.append(f"{name}, {where}: {type(failure).__name__}: {failure}")
                continue
            expected = without if error or name in IN_BLOCKS_ONLY else plain
            found = found[len(found) - len(without) :] if name in IN_BLOCKS_ONLY else found
            if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
                wrong.append(f"{name}, {where}: results differ")
    b.owned.close()
    return wrong, tried


FEW = ["inside", "nested", "after"]
SETTINGS: dict[str, tuple[tuple[int, int], list[str], dict[str, Any]]] = {
    "1 rank": ((1, 1), FEW, {}),
    "1 x 2": ((1, 2), list(PLACES), {}),
    "1 x 2, never resharded": ((1, 2), FEW[:2], {"reshard_after_forward": False, "prefetch": 2}),
    "2 x 2": ((2, 2), FEW, {}),
    "2 x 2, bf16, never resharded": ((2, 2), FEW[:1], {"reshard_after_forward": False, "dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_every_operation_at_every_place(setting):
    shape, places, options = SETTINGS[setting]
    for wrong, tried in run_ranks(table, shape[0] * shape[1], shape, places, options, limit=120):
        assert not wrong, "\n".join(wrong)
        assert tried == len(OPERATIONS) * len(places) - len(IN_BLOCKS_ONLY) * ("after" in places)


def _beside_fsdp2(rank, world):
    model = toy.make_toy()
    owned = toy.shard(model, toy.mesh_of(2, 2), ranks_per_node=2)
    tokens = torch.arange(2 * toy.LENGTH).view(2, toy.LENGTH) % toy.VOCAB
    expected = model(tokens).detach()
    with owned.gathered():
        for _ in range(3):
            assert torch.equal(model(tokens), expected)
    toy.loss_of(model, 0, 0, rank).backward()
    assert not left_gathered(owned)
    with owned.gathered():
        owned.close()  # what is shown needs no message
        model.layers[0].qkv.weight.sum()


def test_forwards_with_fsdp2_beside():
    run_ranks(_beside_fsdp2, 4, ranks_per_node=2)


# ---- declared changes ----


def _expected(before: dict[str, torch.Tensor], name: str, change: Callable[[torch.Tensor], None], dtype: torch.dtype):
    """Masters after the change of a weight in ``dtype``: where an element is another, else as before."""
    after = {}
    for key, master in before.items():
        shown = master.to(dtype)
        if key.partition("[")[0] == name:
            changed = shown.clone()
            change(changed)
            master = torch.where((changed != shown) | changed.isnan(), changed.float(), master)
        after[key] = master
    return after


NAMES = ("first.weight", "layers.0.up.weight", "layers.1.down_EMN", "layers.1.norm.bias")
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "scaled": lambda w: w.mul_(1.5),
    "negated": lambda w: w.neg_(),
    "filled": lambda w: w.fill_(0.25),
    "part of the rows": lambda w: w[..., 2:5].add_(1),
    "one column": lambda w: w[..., 3:4].zero_(),
    "not a number": lambda w: w[..., :1].fill_(float("nan")),
    "nothing": lambda w: w.mul_(1),
}


def _change(how: str, parameter: nn.Parameter, change: Callable[[torch.Tensor], Any]) -> None:
    if how == "in place":
        change(parameter)
    elif how == "data in place":
        change(parameter.data)
    else:  # an assignment to data
        new = parameter.data.clone()
        change(new)
        parameter.data = new


def _writes(rank: int, world: int, shape: tuple[int, int], dtype: torch.dtype | None) -> int:
    tried = 0
    b = Bench(rank, shape, dtype)
    start = b.masters()
    for name in NAMES:
        for what, change in CHANGES.items():
            for how in ("in place", "data in place", "data") if what == "scaled" else ("in place",):
                for key, master in b.owned.masters().items():
                    master.copy_(start[key])
                b.owned.mark_stale()
                with b.owned.gathered(write=True):
                    _change(how, b.model.get_parameter(name), change)
                    b.model(b.x())  # sees it
                    assert all(torch.equal(m, start[k]) for k, m in b.owned.masters().items())  # at the end
                case = f"{name} {what} {how}"
                for key, master in _expected(start, name, change, b.dtype).items():
                    assert torch.equal(b.owned.masters()[key].nan_to_num(7), master.nan_to_num(7)), f"{case}: {key}"
                shown = b.masters()
                with b.owned.gathered():  # holders have it as well
                    b.require_shown() if what != "not a number" else None
                    for key, master in shown.items():
                        weight = b.model.get_parameter(key.partition("[")[0])
                        piece = weight if weight.ndim < 3 else weight[int(key[-2])]
                        assert torch.equal(piece.nan_to_num(7), master.to(b.dtype).nan_to_num(7)), case
                tried += 1
    b.require_hidden()
    b.owned.close()
    return tried


@pytest.mark.parametrize(("shape", "dtype"), [((1, 1), None), ((1, 2), torch.bfloat16), ((2, 2), None)])
def test_declared_changes_reach_the_masters(shape, dtype):
    assert run_ranks(_writes, shape[0] * shape[1], shape, dtype)[0] == len(NAMES) * (len(CHANGES) + 2)


def _not_alike(rank: int, world: int) -> None:
    b = Bench(rank, (2, 2))
    before = b.masters()
    x = torch.ones(2, DIM)
    result = b.model(x).detach()
    cases = 0
    for name in NAMES:
        for change in ("scaled", "negated", "one column"):
            for ranks in ({0}, {3}, {1, 2}):
                for write in (True, False):
                    differ = pytest.raises(
                        RuntimeError, match=rf"{name} was changed .* is not the same on ranks 0 and \d"
                    )
                    with differ, b.owned.gathered(write=write):
                        if rank in ranks:
                            CHANGES[change](b.model.get_parameter(name))
                    cases += 1
    for name in NAMES:
        with pytest.raises(RuntimeError, match=f"{name} was changed inside.*Declare it"), b.owned.gathered():
            b.model.get_parameter(name).data.mul_(2)
        with pytest.raises(RuntimeError, match=f"{name} was replaced or removed"), b.owned.gathered(write=True):
            b.model.get_parameter(name).data = torch.ones(3)
    with pytest.raises(RuntimeError, match="first.weight was changed inside.*Declare it"), b.owned.gathered():
        b.model.first.weight.mul_(2)
        with b.owned.gathered(write=True):  # of the outer block's change nothing was declared
            pass
    with contextlib.suppress(ValueError), b.owned.gathered(write=True):
        b.model.first.weight.mul_(2)
        raise ValueError("planted")
    assert torch.equal(b.model(x), result)
    assert cases == 72 and all(torch.equal(m, before[k]) for k, m in b.owned.masters().items())
    b.require_hidden()
    with b.owned.gathered(write=True):
        b.model.first.weight.mul_(2)
        with b.owned.gathered():
            assert b.model.last.weight is b.model.first.weight
        with b.owned.gathered(write=True):
            b.model.layers[0].up.weight.mul_(2)
        after_inner = b.masters()
        b.model.first.weight.mul_(2)
    for key, master in b.owned.masters().items():
        factor = {"first.weight": 4, "layers.0.up.weight": 2}.get(key.partition("[")[0], 1)
        assert torch.equal(master, before[key] * factor)
        assert torch.equal(after_inner[key], before[key] * min(factor, 2))
    b.train()
    b.owned.close()


def test_changes_that_are_not_declared_or_not_alike():
    run_ranks(_not_alike, 4, ranks_per_node=2)


def _dropped(rank: int, world: int, shape: tuple[int, int]) -> None:
    b = Bench(rank, shape)
    x = torch.ones(2, DIM)
    result = b.model(x).detach()
    for write, error in ((False, None), (True, ValueError("planted")), (False, KeyboardInterrupt())):
        with pytest.raises((RuntimeError, ValueError, KeyboardInterrupt)), b.owned.gathered(write=write):
            b.model.first.weight.mul_(2)
            if error:
                raise error
        assert torch.equal(b.model(x), result)
    b.owned.close()


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2)])
def test_a_dropped_change_is_gone(shape):
    """Also where a rank is a shard group by itself, and what it shows is the copy that it computes with."""
    run_ranks(_dropped, shape[0] * shape[1], shape)


def test_fingerprints_tell_small_changes():
    """Those that a plain sum or exclusive or of the bits would miss too."""
    weight = torch.randn(2**20 + 4, generator=torch.Generator().manual_seed(0))
    changed = [weight.neg(), weight.flip(0), weight.roll(1), weight.roll(2**20), weight * 2, weight.clone()]
    changed[-1][:2] = weight[:2].flip(0)
    zeros = torch.zeros(8)
    numbers = {int(fingerprint(w)) for w in [weight, *changed, zeros, -zeros, zeros[:7], zeros + 1]}
    assert len(numbers) == 10  # zeros of any count are alike; the shapes are
