"""What stands in for a weight that is not gathered: a parameter where it is described, refused wherever it is used.

The first table holds every attribute and method of torch.Tensor against an ordinary parameter: a placeholder answers
the same, or raises with its name. It never answers otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.runtime.parameter import FreedTensor

from .ranks import run_ranks
from .test_misuse import alone
from .test_runtime import make_muon, own, tower

NAME = "layers.1.up.weight"
NOT_GATHERED = rf"{NAME} (is not gathered here|has one owner)|no such attribute"

# ---- every attribute and method ----

# Asked of the class or of the interpreter, not of the tensor; or nothing but the class's own machinery.
_MACHINERY = {
    "__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__delattr__",
    "__setattr__", "__dict__", "__doc__", "__module__", "__weakref__", "__annotations__", "__torch_function__",
    "__torch_dispatch__", "__array_priority__", "__dlpack_c_exchange_api__", "_cdata", "_make_subclass",
    "_make_wrapper_subclass", "_dtensor__new__", "_fix_weakref", "_use_count", "_python_dispatch", "__dir__",
    "__sizeof__", "__getstate__", "_clear_non_serializable_cached_data", "__hash__", "_backward_hooks",
    "_post_accumulate_grad_hooks",
}  # fmt: skip
NAMES = sorted(set(dir(torch.Tensor)) - _MACHINERY)
# Arguments of methods that cannot be called without; others are tried with none, a number, and the tensor itself.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "to": (torch.float64,), "type_as": (torch.ones(1),), "expand": (16, 8), "view": (8, 16), "reshape": (8, 16),
    "permute": (1, 0), "transpose": (0, 1), "new_full": ((2,), 1.0), "as_strided": ((2,), (1,)), "new_empty": ((2,),),
    "new_zeros": ((2,),), "new_ones": ((2,),), "new_empty_strided": ((2,), (1,)), "requires_grad_": (True,),
    "__format__": ("",), "__getitem__": (0,), "__setitem__": (0, 1.0), "__deepcopy__": ({},), "__reduce_ex__": (2,),
    "new_tensor": ([1.0],), "split": (4,), "repeat": (2, 2), "register_hook": (print,), "apply_": (abs,),
    "register_post_accumulate_grad_hook": (print,), "__array__": (), "is_same_size": (torch.ones(16, 8),),
}  # fmt: skip


def _asked(parameter: torch.Tensor, name: str) -> list[Any]:
    """What the attribute is, or what the method returns or raises for each of several arguments."""
    try:
        found = getattr(parameter, name)
    except Exception as error:
        return [error]
    if not callable(found):
        return [found]
    answers = []
    for arguments in [_ARGUMENTS[name]] if name in _ARGUMENTS else [(), (1,), (parameter,)]:
        try:
            answers.append(found(*arguments))
        except Exception as error:
            answers.append(error)
    return answers


def _alike(mine: Any, ordinary: Any) -> bool:
    """Whether an answer is an ordinary parameter's, or a description of the tensor that it would be."""
    if isinstance(mine, FreedTensor):
        return (mine.shape, mine.dtype, mine.device) == (ordinary.shape, ordinary.dtype, ordinary.device)
    if isinstance(mine, torch.Tensor):
        return type(ordinary) is type(mine) and (mine.shape, mine.dtype) == (ordinary.shape, ordinary.dtype)
    if isinstance(mine, Exception):
        said = str(mine).replace("FreedParameter", "Parameter")
        return type(mine) is type(ordinary) and said == str(ordinary)
    return bool(mine == ordinary)


# Where a placeholder says something else than the ordinary parameter does, and what.
_OTHERWISE: dict[str, Any] = {"data_ptr": 0, "_version": 0, "__repr__": None, "__str__": None, "__format__": None}


def _wrong_answers(name: str, placeholder: torch.Tensor, ordinary: torch.Tensor) -> list[str]:
    wrong = []
    for mine, theirs in zip(_asked(placeholder, name), _asked(ordinary, name), strict=True):
        if isinstance(mine, RuntimeError) and NAME in str(mine):
            continue
        if name in _OTHERWISE:
            right = mine == _OTHERWISE[name] if _OTHERWISE[name] is not None else NAME in str(mine)
            right = right or (isinstance(mine, TypeError) and isinstance(theirs, TypeError))
        elif name in ("untyped_storage", "_typed_storage"):
            right = isinstance(mine, TypeError) or mine.nbytes() == 0
        else:
            right = _alike(mine, theirs)
        if not right:
            wrong.append(f"{name}: {str(mine)[:150]!r} instead of {str(theirs)[:150]!r}")
    return wrong


def test_every_attribute_describes_or_refuses():
    model, _ = alone()
    values = tower().get_parameter(NAME).detach()
    wrong = []
    for name in NAMES:
        wrong += _wrong_answers(name, model.get_parameter(NAME), nn.Parameter(values.clone()))
    assert not wrong, "\n".join(wrong)
    assert len(NAMES) > 600
    described = [n for n in NAMES if not isinstance(_asked(model.get_parameter(NAME), n)[0], Exception)]
    assert {"device", "shape", "dtype", "is_meta", "data_ptr", "nbytes", "layout", "type", "is_cuda"} <= set(described)


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "linear": lambda p, x: nn.functional.linear(x, p),
    "matmul on the right": lambda p, x: x @ p.T,
    "concatenated": lambda p, x: torch.cat([x, p]),
    "norms": lambda p, x: torch._foreach_norm([x, p]),
    "vectors": lambda p, x: nn.utils.parameters_to_vector([p]),
    "out": lambda p, x: torch.add(x, 1, out=p.data),
    "broadcast": lambda p, x: dist._broadcast_coalesced(None, [p], 1, 0),
    "normal": lambda p, x: nn.init.normal_(p),
    "copy into an ordinary tensor": lambda p, x: torch.empty(16, 8).copy_(p),
    "assigned data": lambda p, x: setattr(p, "data", torch.ones(16, 8)),
    "assigned gradient": lambda p, x: setattr(p, "grad", torch.ones(16, 8)),
    "a cast used": lambda p, x: x @ p.to(torch.float64).float().t(),
    "detached": lambda p, x: p.detach().clone(),
    "numpy": lambda p, x: p.data.numpy(),
    "serialized": lambda p, x: torch.save(p.data, "/dev/null"),
    "copied": lambda p, x: copy.deepcopy(p.data),
    "values for another": lambda p, x: x.new_tensor(p),
    "filled with another": lambda p, x: torch.full_like(x, p[0, 0]),
    "of a layout": lambda p, x: x.as_strided((1,), (1,)).set_(p),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_use_is_refused_by_name(name):
    model, _ = alone()
    if name == "broadcast":
        FUNCTIONS[name] = lambda p, x: torch.ops.aten.add(p, x)  # past __torch_function__: as C++ code calls
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match=NOT_GATHERED):
            FUNCTIONS[name](model.get_parameter(NAME), torch.ones(16, 8))
        return
    with pytest.raises(RuntimeError, match=NOT_GATHERED):
        FUNCTIONS[name](model.get_parameter(NAME), torch.ones(16, 8))


def test_descriptions_make_tensors_of_the_same_kind():
    model, _ = alone(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    p = model.get_parameter(NAME)
    assert next(model.parameters()).device == torch.device("cpu") and not p.is_meta and p.is_leaf
    x = torch.ones(3)
    for made in (x.to(p.device, p.dtype), x.to(p), x.type_as(p), p.new_zeros(3), torch.zeros_like(p), p.new_ones(3)):
        assert type(made) is torch.Tensor and made.dtype == torch.bfloat16 and made.device.type == "cpu"
    assert torch.zeros_like(p).stride() == (8, 1) and torch.empty_like(p, dtype=torch.float32).shape == (16, 8)
    assert (p.nbytes, p.data_ptr(), p.type()) == (256, 0, "torch.BFloat16Tensor")
    assert isinstance(p, nn.Parameter) and not isinstance(p.data, nn.Parameter)


# ---- what libraries do with the parameters of a model ----


def test_a_cast_of_its_own_data_is_as_a_cast_of_the_model(caplog):
    """As of libraries that give parameters float32 masters: owned ones have them."""
    model, owned = alone(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for p in model.parameters():
        p.data = p.data.to(torch.float32)
    assert "first.weight stays torch.bfloat16 where the model is cast to torch.float32" in caplog.text
    assert all(m.dtype == torch.float32 for m in owned.masters().values())
    with owned.gathered():
        assert model.first.weight.dtype == torch.bfloat16


def test_walks_over_parameters():
    model, _ = alone()
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == sum(p.numel() for p in tower().parameters())
    assert not any(p.is_meta for p in parameters) and {p.device.type for p in parameters} == {"cpu"}
    assert len({id(p) for p in parameters}) == len(set(parameters)) == len(parameters)
    for optimizer in (torch.optim.AdamW(parameters, fused=True), torch.optim.SGD(parameters, foreach=True)):
        optimizer.step()
        optimizer.zero_grad()
    model.requires_grad_(False).requires_grad_(True)
    assert all(p.requires_grad for p in parameters)
    assert "layers.1.up.weight" in str(model.layers[1].up.weight)


def _under_ddp(rank: int, world: int) -> None:
    model, plain = tower(), tower()
    owned = own(model, 1, 2, select="layers.*weight$")
    for parallel in (DistributedDataParallel(model), DistributedDataParallel(plain)):
        train_backward(parallel, rank)
    owned.engine.finish_reduces()
    assert torch.allclose(model.first.weight.grad, plain.first.weight.grad, atol=1e-6)
    for unit in owned.engine.units:
        for key, master in unit.master_of.items():
            assert torch.allclose(master.grad, plain.get_parameter(key.partition("[")[0]).grad, atol=1e-6), key
    owned.close()


def test_ddp_takes_the_other_parameters():
    run_ranks(_under_ddp, 2)


# ---- gradients are at their owners ----

TORCH_CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_norm_, foreach": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True),
    "clip_grad_norm_ of a layer": lambda m: nn.utils.clip_grad_norm_(m.layers[1].parameters(), 1.0),
    "clip_grad_norm_ of one": lambda m: nn.utils.clip_grad_norm_(m.layers[1].up.weight, 1.0),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "get_total_norm": lambda m: nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None]),
    "own loop": lambda m: sum(p.grad.norm() for p in m.parameters() if p.grad is not None),
    "scaled": lambda m: [p.grad.mul_(2) for p in m.parameters() if p.grad is not None],
    "unscaled": lambda m: unscale(torch.optim.SGD(m.parameters())),
    "in a closure": lambda m: torch.optim.SGD(m.parameters()).step(
        lambda: nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    ),
}


def unscale(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def train_backward(model: nn.Module, rank: int = 0) -> None:
    model(torch.full((4, 8), 0.1 + rank)).square().sum().backward()


@pytest.mark.parametrize("how", TORCH_CLIPS)
def test_norms_and_clips_of_what_is_not_here_are_refused(how):
    model, owned = alone()
    TORCH_CLIPS["get_total_norm"](model)  # nothing there yet
    train_backward(model)
    before = {k: m.grad.clone() for u in owned.engine.units for k, m in u.master_of.items() if m.grad is not None}
    with pytest.raises(
        (RuntimeError, AssertionError), match="the gradient of .*weight is reduced to its owner.*clip_grad"
    ):
        TORCH_CLIPS[how](model)
    assert all(
        torch.equal(m.grad, before[k]) for u in owned.engine.units for k, m in u.master_of.items() if k in before
    )
    owned.clip_grad_norm_(model, 1.0)
    owned.build_optimizer(make_muon).step()
    TORCH_CLIPS["get_total_norm"](model)  # and none any more


def test_optimizers_of_all_parameters_pass_owned_ones_over():
    model, owned = alone()
    before = {k: m.clone() for k, m in owned.masters().items()}
    others = [torch.optim.AdamW(model.parameters(), foreach=f) for f in (True, False)]
    train_backward(model)
    for other in others:
        other.step()
        other.zero_grad()
        other.zero_grad(set_to_none=False)
        assert not other.state
    assert all(torch.equal(m, before[k]) for k, m in owned.masters().items())
    scaler = dmuon.GradScaler(owned, "cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(others[0])  # which covers owned gradients, with their own optimizer
    owned.build_optimizer(make_muon).step()
    assert not any(torch.equal(m, before[k]) for k, m in owned.masters().items())


DROPS: dict[str, Callable[[nn.Module], Any]] = {
    "zero_grad of a layer": lambda m: m.layers[1].zero_grad(),
    "zero_grad of a layer, to zeros": lambda m: m.layers[1].zero_grad(set_to_none=False),
    "each to None": lambda m: [setattr(p, "grad", None) for p in m.layers[1].parameters()],
    "each to zeros": lambda m: [p.grad.zero_() for p in m.layers[1].parameters()],
}


def _dropped(rank: int, world: int, drop: str, deferred: bool) -> None:
    model = tower()
    owned = own(model, 2, 2)
    optimizer = owned.build_optimizer(make_muon)
    before = {k: m.clone() for k, m in owned.masters().items()}
    owned.set_is_last_backward(not deferred)
    train_backward(model, rank)
    DROPS[drop](model)
    if deferred:
        owned.set_is_last_backward(True)
        model(torch.ones(4, 8), skip=("1",)).sum().backward()
    optimizer.step()
    for key, master in owned.masters().items():
        assert torch.equal(master, before[key]) == key.startswith("layers.1."), key
    owned.close()


@pytest.mark.parametrize("drop", DROPS)
def test_gradients_of_a_part_are_dropped(drop):
    for deferred in (False, True):
        run_ranks(_dropped, 4, drop, deferred, ranks_per_node=2)


@pytest.mark.parametrize("give", [list, iter, tuple, lambda p: nn.ParameterList(p).parameters()])
def test_the_joint_clip_takes_parameters(give):
    norms = []
    for parameters in (False, True):
        model, owned = alone(select="up.weight$")
        train_backward(model)
        norms.append(owned.clip_grad_norm_(give(list(model.parameters())) if parameters else model, 0.1))
        norms += [m.grad for u in owned.engine.units for m in u.master_of.values()]
        norms += [model.first.weight.grad]
    assert all(map(torch.equal, norms[: len(norms) // 2], norms[len(norms) // 2 :]))
    with pytest.raises(TypeError, match="takes the model, or its parameters, got a str"):
        owned.clip_grad_norm_(["x"], 1.0)
    with pytest.raises(TypeError, match="takes the model, or its parameters, got a int"):
        owned.clip_grad_norm_(3, 1.0)


# ---- what else may be put into a module ----

REPLACED: dict[str, Callable[[nn.Module], Any]] = {
    "assigned": lambda up: setattr(up, "weight", nn.Parameter(torch.ones(16, 8))),
    "registered": lambda up: up.register_parameter("weight", nn.Parameter(torch.ones(16, 8))),
    "None": lambda up: setattr(up, "weight", None),
    "deleted": lambda up: delattr(up, "weight"),
    "parametrized": lambda up: parametrize.register_parametrization(up, "weight", nn.Identity(), unsafe=True),
    "deleted, a buffer instead": lambda up: (delattr(up, "weight"), up.register_buffer("weight", torch.ones(16, 8))),
    "shared": lambda up: setattr(up, "weight", nn.Linear(8, 16).weight),
}
THEN: dict[str, Callable[[nn.Module, dmuon.OwnedMatrices], Any]] = {
    "forward": lambda m, o: m(torch.ones(2, 8)),
    "gathered": lambda m, o: o.gathered().__enter__(),
    "state dict": lambda m, o: m.state_dict(),
    "load": lambda m, o: m.load_state_dict({}, strict=False),
}


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("reshard", [True, False])
def test_a_replaced_parameter_is_refused_at_its_next_use(how, then, reshard):
    model, owned = alone(reshard_after_forward=reshard)
    model(torch.ones(2, 8))
    try:
        REPLACED[how](model.layers[1].up)
    except RuntimeError as error:
        assert NAME in str(error)  # refused at once
        return
    with pytest.raises(RuntimeError, match=f"{NAME} was replaced or removed in its module after own_matrices"):
        THEN[then](model, owned)


@pytest.mark.parametrize("how", REPLACED)
def test_a_parameter_replaced_in_a_block_is_refused_at_its_end(how):
    model, owned = alone()
    with pytest.raises(RuntimeError, match=f"{NAME} was replaced or removed in its module inside"), owned.gathered():
        REPLACED[how](model.layers[1].up)


# ---- names of tied weights ----


def tied(units: str = "layers", **options: Any) -> tuple[nn.Module, dmuon.OwnedMatrices]:
    model = tower()
    model.layers[2].up.weight = model.layers[0].up.weight
    model.add_module("again", model.layers[1])  # a module with two names
    return model, alone_with(model, **options)


def alone_with(model: nn.Module, **options: Any) -> dmuon.OwnedMatrices:
    from .test_misuse import ALONE

    return dmuon.own_matrices(model, ALONE, **{"units": model.layers, **options})


@pytest.mark.parametrize("select", [
    r"layers\.2\.up", r"layers\.0\.up", r"again.down|layers\.2\.up", lambda name, _p: name == "layers.2.up.weight",
    [dmuon.OwnedSpec("layers.2.up.weight", (16, 8))], [dmuon.OwnedSpec("again.up.weight", (16, 8))],
])  # fmt: skip
def test_a_tied_weight_is_selected_by_any_of_its_names(select):
    model, owned = tied(select=select)
    assert set(owned.names) <= {"layers.0.up.weight", "layers.1.down.weight", "layers.1.up.weight"} and owned.names
    train_backward(model)
    owned.build_optimizer(make_muon).step()


def test_other_options_take_any_name_too():
    layout = dmuon.MatrixLayout(rows=(8, 8))
    model, owned = tied(select="up.weight$", layouts={r"layers\.2\.up": layout}, riders="nothing")
    assert next(p for p in owned.plan.pieces if p.name == "layers.0.up.weight").layout == layout
    owned.fill("layers.2.up.weight", lambda piece: torch.ones(piece.shape))
    owned.initialize_one("again.up.weight", lambda tensor: tensor.fill_(2), seed=0)
    assert float(owned.masters()["layers.0.up.weight[000000]"].mean()) == 1
    assert float(owned.masters()["layers.1.up.weight[000000]"].mean()) == 2
    with pytest.raises(KeyError, match="first.weight is no owned parameter; their names look like: "):
        owned.fill("first.weight", lambda piece: torch.ones(8, 8))
    optimizer = owned.build_optimizer(
        make_muon, groups=[(lambda n: n == "layers.2.up.weight", {"lr": 1.0}), (bool, {})]
    )
    assert optimizer.param_groups[0]["param_names"] == ["layers.0.up.weight"]


# ---- units of several modules, other methods ----


def test_lists_of_modules_that_are_no_units():
    model = tower()
    for units, message in {
        "a module is in several": (
            [[model.layers[0], model.layers[1]], model.layers[1]],
            "layers.1 is in several of them",
        ),
        "none": ([[]], r"\[\] is neither a module nor a list of modules"),
        "no module": ([model.layers[0], "layers.1"], "'layers.1' is neither a module nor a list of modules"),
        "a stranger": ([[model.layers[0], nn.Linear(2, 2)]], "Linear is not a submodule of the model"),
    }.values():
        with pytest.raises(ValueError, match=message):
            alone_with(model, select="up", units=units)
    owned = alone_with(model, select="weight$", units=[[model.layers[0].up, model.layers[0].down], *model.layers[1:]])
    assert [u.name for u in owned.engine.units] == ["(root)", "layers.0.up + layers.0.down", "layers.1", "layers.2"]


def test_methods_that_cannot_be_forward_methods():
    model, owned = alone()
    with pytest.raises(ValueError, match="Layer has no method 'encode'"):
        owned.register_forward_method(model.layers[0], "encode")
    with pytest.raises(
        ValueError, match="Linear is no unit; layers.0.up.weight, which it holds, belongs to layers.0: "
    ):
        owned.register_forward_method(model.layers[0].up, "forward")
    owned.register_forward_method(model.layers, "extend")  # its units gather by their own calls
    owned.register_forward_method(nn.Linear(2, 2), "forward")


# ---- dtypes that do not fit ----


@pytest.mark.parametrize("wrapped", ["nothing", "the root", "all"])
def test_a_dtype_that_does_not_fit_is_explained(wrapped):
    run_ranks(_unlike, 1, wrapped)


def _unlike(rank: int, world: int, wrapped: str) -> None:
    model = tower()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    owned = own(model, 1, 1, select="layers.*weight$", dtype=torch.bfloat16)
    if wrapped == "all":
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy, ignored_params=owned.parameters)
    if wrapped != "nothing":
        fully_shard(model, ignored_params=owned.parameters)
    if wrapped == "all":
        model(torch.ones(2, 8)).sum().backward()
    else:
        with pytest.raises(RuntimeError, match="must have the same dtype|same dtype") as error:
            model(torch.ones(2, 8))
        (note,) = error.value.__notes__
        assert (
            note.startswith("layers.0: its owned weights are gathered as torch.bfloat16")
            and "inputs torch.float32" in note
        )
        assert "give `fully_shard` of this module an mp_policy" in note
    with pytest.raises(RuntimeError) as other:
        model(torch.ones(2, 3))
    assert wrapped != "all" or not hasattr(other.value, "__notes__")
    owned.close()
