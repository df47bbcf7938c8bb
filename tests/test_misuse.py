"""What a user may do wrong around owned weights, and what the error then says."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torchtitan_dmuon as dmuon
from torchtitan_dmuon.checkpoint import load_optimizer_state, optimizer_state
from torchtitan_dmuon.runtime.lanes import CpuLane
from torchtitan_dmuon.runtime.rank_grid import RankGrid

from .ranks import run_ranks
from .test_runtime import backward, make_muon, own, tower

ALONE = RankGrid((0,), 1, "cpu")


def alone(grid: RankGrid = ALONE, **options: Any):
    model = tower()
    return model, dmuon.own_matrices(model, grid, **{"select": "weight$", "units": model.layers, **options})


def test_a_second_optimizer_is_refused():
    _, owned = alone()
    owned.build_optimizer(dmuon.Muon)
    with pytest.raises(ValueError, match="build_optimizer was called before.*groups=..."):
        owned.build_optimizer(torch.optim.AdamW)


def _edit(rank, world):
    model = tower()
    owned = own(model, 1, 2)
    with owned.gathered():
        model.layers[1].up.weight.sum()
    changed = pytest.raises(RuntimeError, match=r"layers.1.up.weight was changed inside .*owned.fill\(name, value_of\)")
    with changed, owned.gathered():
        model.layers[1].up.weight.data.mul_(2)
    owned.close()


def test_a_change_of_gathered_weights_is_not_lost_silently():
    run_ranks(_edit, 2)


def test_a_scalar_rider_is_read_and_guarded_like_any_other():
    model = tower()
    for layer in model.layers:
        layer.gate = nn.Parameter(torch.tensor(0.5))
    owned = dmuon.own_matrices(model, ALONE, select="weight$", units=model.layers, riders="gate")
    with owned.gathered():
        assert model.layers[0].gate.shape == () and float(model.layers[0].gate) == 0.5
    with pytest.raises(RuntimeError, match="layers.1.gate was changed inside"), owned.gathered():
        model.layers[1].gate.data.mul_(2)


def test_stacks_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match="stacks = 'experts' matches no selected parameter with 3 dimensions"):
        alone(stacks="experts")


def test_copies_and_casts_of_an_owning_model(caplog):
    model, owned = alone()
    parts = {"first": model, "layers.0.up": model.layers[0].up, "layers.0.": model.layers[0], "layers.": model.layers}
    for copied in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        for name, part in parts.items():
            for block in (contextlib.nullcontext(), owned.gathered()):
                refused = rf"{name}.*weight has one owner, so a model with owned.* cannot be copied"
                with block, pytest.raises(RuntimeError, match=refused):
                    copied(part)
    with caplog.at_level(logging.WARNING):
        model.to("cpu")
        assert not caplog.records
        model.to(torch.bfloat16)
    assert "stays torch.float32 where the model is cast to torch.bfloat16" in caplog.text


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_not_lost_silently(register, no_groups):
    model = tower()
    handle = getattr(model.layers[1].up.weight, register)(lambda _: None)
    with pytest.raises(ValueError, match="layers.1.up.weight has gradient hooks, which would be lost"):
        dmuon.own_matrices(model, ALONE, select="weight$", units=model.layers)
    handle.remove()
    with pytest.raises(pytest.fail.Exception, match="as far as the groups"):
        dmuon.own_matrices(model, ALONE, select="weight$", units=model.layers)


def test_a_hook_registered_in_a_block_stays():
    model, owned = alone()
    optimizer = owned.build_optimizer(torch.optim.SGD, lr=1.0)
    with owned.gathered():
        model.layers[0].up.weight.register_hook(torch.zeros_like)
    before = {name: master.clone() for name, master in owned.masters().items()}
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    moved = {name for name, master in owned.masters().items() if not torch.equal(master, before[name])}
    assert set(before) - moved == {"layers.0.up.weight[000000]"}


def test_a_failed_exchange_says_what_to_look_for():
    lane = CpuLane("test")
    ticket = lane.submit(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="failed on this rank: division by zero. All ranks must run the same passes"):
        ticket.wait()
    lane.close()


SPEC = dmuon.OwnedSpec("first.weight", (8, 8))
NARROW = dmuon.OwnedSpec("layers.0.up.weight", (8, 16))
REFUSED: dict[str, dict[str, Any]] = {
    "gradient_divide_factor = -1: must be a finite number above 0": {"gradient_divide_factor": -1},
    "gradient_divide_factor = 0: ": {"gradient_divide_factor": 0},
    "gradient_divide_factor = inf: ": {"gradient_divide_factor": float("inf")},
    "gradient_divide_factor = nan: ": {"gradient_divide_factor": float("nan")},
    "prefetch = '1': must be an integer, at least 0": {"prefetch": "1"},
    "prefetch = 1.5: ": {"prefetch": 1.5},
    "prefetch = None: ": {"prefetch": None},
    "ranks_per_node = '2': ": {"ranks_per_node": "2"},
    "mp_policy = torch.bfloat16: must be a MixedPrecisionPolicy": {"mp_policy": torch.bfloat16},
    "layouts = {'up': 'x'}: must be a mapping": {"layouts": {"up": "x"}},
    "units = None: must be modules": {"units": None},
    "reshard_after_forward = 2: must be True or False": {"reshard_after_forward": 2},
    "timeout = 5: must be a datetime.timedelta": {"timeout": 5},
    r"select: '\(' is no regular expression": {"select": "("},
    r"layouts: '\(' is no regular expression": {"layouts": {"(": dmuon.MatrixLayout()}},
    "select: 'first.weight' is no OwnedSpec": {"select": ["first.weight"]},
    "first.weight: select has several specs of it": {"select": [SPEC, SPEC]},
    r"layers.0.up.weight: its spec has shape \(8, 16\), the parameter \(16, 8\)": {"select": [SPEC, NARROW]},
    "mp_policy: reduce_dtype = torch.int8: must be one of": {
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.int8)
    },
    "param_dtype = torch.float8_e4m3fn: ": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn)},
    "param_dtype = torch.float64: must be one of": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)},
}


@pytest.fixture
def no_groups(monkeypatch):
    """Fails where process groups would be made."""
    monkeypatch.setattr("torchtitan_dmuon.runtime.owned.connect", lambda *_: pytest.fail("went as far as the groups"))


@pytest.mark.parametrize("message", REFUSED)
def test_bad_options_are_refused_by_name_before_groups_exist(message, no_groups):
    with pytest.raises(ValueError, match=message):
        alone(**REFUSED[message])


def test_weights_of_other_dtypes_are_refused(no_groups):
    model = tower().double()
    with pytest.raises(ValueError, match="first.weight is torch.float64: owned parameters are one of torch.float32"):
        dmuon.own_matrices(model, ALONE, select="weight$", units=model.layers)


@pytest.mark.parametrize("value", ["x", "0", ""])
def test_a_bad_environment_is_named(value, no_groups, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE = '{value}' in the environment"):
        alone()
    alone_with_debug = pytest.raises(ValueError, match="DMUON_DEBUG = 'yes' in the environment: must be 1 or 0")
    monkeypatch.setenv("DMUON_DEBUG", "yes")
    with alone_with_debug:
        alone(ranks_per_node=1)


def test_meshes_that_do_not_fit(no_groups, monkeypatch):
    with pytest.raises(ValueError, match=r"must ascend, row by row, got \(1, 0\)"):
        RankGrid((1, 0), 2, "cpu")
    with pytest.raises(ValueError, match="mesh = None: must be a DeviceMesh"):
        alone(None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    with pytest.raises(ValueError, match=r"this is rank 1, which is not among those of the mesh: \(5, 6\)"):
        alone(RankGrid((5, 6), 2, "cpu"))


@pytest.mark.parametrize("bound", [float("nan"), -1.0])
def test_a_norm_to_clip_to_is_no_less_than_zero(bound):
    model, owned = alone()
    backward(model, 0, 0)
    with pytest.raises(ValueError, match=f"max_norm = {bound}: must be at least 0"):
        owned.clip_grad_norm_(model, bound)
    owned.clip_grad_norm_(model, float("inf"))


def test_after_close_everything_says_so():
    model, owned = alone()
    optimizer = owned.build_optimizer(make_muon)
    backward(model, 0, 0)
    before = {key: master.clone() for key, master in owned.masters().items()}
    owned.close()
    for use in (optimizer.step, lambda: backward(model, 1, 0)):
        with pytest.raises(RuntimeError, match=r"owned.close\(\) was called: no forward, backward or step"):
            use()
    assert all(torch.equal(master, before[key]) for key, master in owned.masters().items())


def test_a_group_that_takes_nothing_is_refused():
    _, owned = alone()
    with pytest.raises(ValueError, match=r"groups\[1\] takes no owned parameter.* look like: first.weight, layers.0"):
        owned.build_optimizer(make_muon, groups=[(lambda n: True, {}), (lambda n: "typo" in n, {"lr": 1.0})])


def test_gradients_that_nothing_uses_are_mentioned_once(caplog):
    model, owned = alone()
    for step, lines in enumerate((0, 1, 1)):
        backward(model, step, 0)
        model.zero_grad()
        assert caplog.text.count("call owned.build_optimizer") == lines
    caplog.clear()
    model, owned = alone()
    owned.build_optimizer(make_muon)
    for step in range(3):
        backward(model, step, 0)
    assert not caplog.records


# ---- what must be equal on all ranks ----

DIFFERENT: dict[str, list[Any]] = {
    "clip": ["joint", "per_matrix"],
    "gradient_divide_factor": [1, 2.0],
    "reshard_after_forward": [True, False],
    "publish": ["async", "sync"],
    "prefetch": [0, 1],
    "routing": ["two_level", "flat"],
    "holders": ["shard_group", "node"],
    "transport": ["padded", "auto"],
}


def _unequal(rank: int, world: int) -> str:
    os.environ["DMUON_DEBUG"] = str(rank)
    policies = (MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy(torch.float32, torch.float16))
    options = {option: values[rank] for option, values in DIFFERENT.items()} | {"mp_policy": policies[rank]}
    model = tower(1)
    with pytest.raises(RuntimeError) as error:
        dmuon.own_matrices(model, init_device_mesh("cpu", (2,)), select="weight$", units=model.layers, **options)
    return str(error.value)


def test_ranks_with_other_options_stop_and_name_them():
    for message in run_ranks(_unequal, 2):
        head, *lines = message.split("\n  ")
        assert head == "ranks 0 and 1 of the data-parallel group have different options:"
        assert "prefetch: 0 against 1" in lines
        assert {line.partition(":")[0] for line in lines} == {*DIFFERENT, "param_dtype", "reduce_dtype", "DMUON_DEBUG"}


def _loaded(rank: int, world: int) -> list[Any]:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    optimizer = own(model, 1, 2, units=[]).build_optimizer(make_muon)
    given = [len(optimizer.param_groups[0]["params"]), optimizer.param_groups[0]["lr"]]
    state = optimizer_state(optimizer)
    state |= {key: 0.5 for key in state if key.endswith(".lr")}
    load_optimizer_state(optimizer, state)
    return [*given, optimizer.param_groups[0]["lr"]]


def test_ranks_that_own_nothing_load_options_too():
    assert sorted(run_ranks(_loaded, 2)) == [[0, 0.02, 0.5], [1, 0.02, 0.5]]


def test_loaded_options_that_replace_others_are_mentioned(caplog):
    _, owned = alone()
    optimizer = owned.build_optimizer(make_muon)
    state = optimizer_state(optimizer)
    state |= {key: 0.5 for key in state if key.endswith((".momentum", ".lr"))}
    load_optimizer_state(optimizer, state)
    load_optimizer_state(optimizer, state)
    assert [record.message for record in caplog.records] == [
        "parameter group 0 takes options from the loaded state: momentum 0.5 instead of 0.95"
    ]
