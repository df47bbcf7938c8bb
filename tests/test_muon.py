"""The update rule against torch.optim.Muon and ten-line references: rules, layouts, batches, state, refusals."""

from __future__ import annotations

import copy
import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

from tests.reference import muon_step, newton_schulz, normalized_rows
from torchtitan_dmuon.lr_factors import lr_factor
from torchtitan_dmuon.matrices import MatrixLayout
from torchtitan_dmuon.muon import (
    Muon,
    layout_of,
    momentum_update,
    muon_flops,
    orthogonalized_updates,
    set_layout,
)
from torchtitan_dmuon.newton_schulz import COEFFICIENTS, NewtonSchulz, flops

SHAPES = {"square": (64, 64), "wide": (24, 96), "tall": (96, 24), "row": (1, 16), "column": (16, 1), "odd": (33, 65),
          "odd tall": (65, 33), "tiny": (7, 5)}  # fmt: skip
EXACT = {"ns_dtype": "float64", "ns_form": "standard"}
KELLER5 = COEFFICIENTS["keller"] * 5


def randn(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def param(*shape: int, seed: int = 0, dtype=torch.float32, layout: MatrixLayout | None = None) -> torch.nn.Parameter:
    p = torch.nn.Parameter(randn(*shape, seed=seed, dtype=dtype))
    if layout is not None:
        set_layout(p, layout)
    return p


def train(optimizer: torch.optim.Optimizer, params, steps: int, scale: float = 1.0) -> None:
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = randn(*p.shape, seed=1000 * step + i, dtype=p.dtype) * scale
        optimizer.step()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# Against torch.optim.Muon ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))
@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-12, 1e15])
def test_twenty_steps_bit_equal_to_torch(shape, scale):
    """CASES 4 with scale 0: the weight only decays, and stays finite."""
    ours, theirs = param(*shape), param(*shape)
    a, b = Muon([ours], ns_dtype="bfloat16"), torch.optim.Muon([theirs])
    train(a, [ours], 20, scale)
    train(b, [theirs], 20, scale)
    assert torch.equal(ours, theirs)
    assert torch.equal(a.state[ours]["momentum_buffer"], b.state[theirs]["momentum_buffer"])
    if scale == 0:
        assert torch.allclose(ours, randn(*shape) * (1 - 1e-3 * 0.1) ** 20)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_rules_bit_equal_to_torch(rule, nesterov):
    kwargs = {"lr": 0.02, "adjust_lr_fn": rule, "nesterov": nesterov, "ns_steps": 3, "weight_decay": 0.3}
    for shape in SHAPES.values():
        ours, theirs = param(*shape), param(*shape)
        train(Muon([ours], ns_dtype="bfloat16", **kwargs), [ours], 3)
        train(torch.optim.Muon([theirs], **kwargs), [theirs], 3)
        assert torch.equal(ours, theirs)


def test_defaults_are_torchs():
    ours, theirs = Muon([param(2, 2)]).param_groups[0], torch.optim.Muon([param(2, 2)]).param_groups[0]
    assert COEFFICIENTS[ours["ns_coefficients"]] == (theirs.pop("ns_coefficients"),)
    assert {k: ours[k] for k in theirs if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


def test_torchs_own_arguments_are_accepted():
    p = param(4, 4)
    train(Muon([p], 0.1, 0.0, 0.9, False, (3.4445, -4.7750, 2.0315), 1e-8, 4, "original"), [p], 1)


# Against references ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize("rule", [None, "match_rms_adamw", "spectral_unclamped", lambda m, n: m + 2 * n])
def test_each_rule_against_the_reference(form, nesterov, cautious, rule):
    for m, n in [(8, 12), (12, 8)]:
        p = param(m, n, dtype=torch.float64)
        w, buffer = p.detach().clone(), torch.zeros(m, n)
        optimizer = Muon([p], lr=0.01, weight_decay=5.0, momentum=0.9, nesterov=nesterov, momentum_form=form,
                         cautious_weight_decay=cautious, adjust_lr_fn=rule, **EXACT)  # fmt: skip
        factor = {None: math.sqrt(max(1, m / n)), "match_rms_adamw": 0.2 * math.sqrt(12),
                  "spectral_unclamped": math.sqrt(m / n)}.get(rule, m + 2 * n)  # fmt: skip
        for step in range(4):
            p.grad = randn(m, n, seed=step, dtype=torch.float64)
            w, buffer = muon_step(w, p.grad, buffer, lr=0.01, weight_decay=5.0, momentum=0.9, nesterov=nesterov,
                                  form=form, cautious=cautious, factor=factor, table=KELLER5)  # fmt: skip
            optimizer.step()
        assert relative(p, w) < 1e-11
        assert relative(optimizer.state[p]["momentum_buffer"], buffer) < 1e-13


@pytest.mark.parametrize("layout", [MatrixLayout(), MatrixLayout(groups=2, rows=(4, 2))])
def test_normuon_against_the_reference(layout):
    p = param(12, 8, dtype=torch.float64, layout=layout)
    w, moments = p.detach().clone(), [[0.0] * m for m, _ in layout.shapes((12, 8))]
    optimizer = Muon([p], lr=0.02, momentum=0.0, row_beta=0.9, adjust_lr_fn="match_rms_adamw", **EXACT)
    for step in range(4):
        p.grad = randn(12, 8, seed=step, dtype=torch.float64)
        updates = []
        for i, block in enumerate(layout.split(p.grad)):
            update, moments[i] = normalized_rows(newton_schulz(block, KELLER5), moments[i], 0.9)
            m, n = block.shape
            updates.append(0.2 * math.sqrt(max(m, n)) * update)
            # The paper's step: 0.2 lr sqrt(m n), whatever the rule that led to it.
            assert float(updates[-1].norm()) == pytest.approx(0.2 * math.sqrt(m * n), rel=1e-12)
        w = w - 0.02 * 0.1 * w - 0.02 * layout.join(updates)
        optimizer.step()
        assert relative(p, w) < 1e-11
    assert optimizer.state[p]["row_second_moment"].shape == (12, 1)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.isfinite(p).all()


def test_normuon_state_moves_in_and_out():
    p, q = param(4, 6), param(4, 6)
    nor, plain = Muon([p], row_beta=0.95), Muon([q])
    train(nor, [p], 2)
    train(plain, [q], 2)
    saved = copy.deepcopy(nor.state_dict())
    nor.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert nor.param_groups[0]["row_beta"] is None
    train(nor, [p], 1)
    assert "row_second_moment" not in nor.state[p]
    plain.load_state_dict(saved)
    train(plain, [q], 1)
    assert plain.state[q]["row_second_moment"].shape == (4, 1)


def test_lr_factor_of_the_field_case():
    """CASES 8: the factor of [4096, 1024], whatever the shards."""
    factors = [lr_factor(rule, 4096, 1024) for rule in ("original", "match_rms_adamw", "spectral_unclamped", None)]
    assert factors == pytest.approx([2.0, 12.8, 2.0, 2.0], abs=1e-12)
    assert lr_factor("original", 1024, 4096) == 1.0 and lr_factor("spectral_unclamped", 1024, 4096) == 0.5


def test_momentum_forms_agree_after_orthogonalization():
    """The inputs differ by 1 - momentum, which Newton-Schulz removes; the buffers keep the difference."""
    p, q = param(8, 12, dtype=torch.float64), param(8, 12, dtype=torch.float64)
    a, b = Muon([p], momentum_form="ema", **EXACT), Muon([q], momentum_form="heavy_ball", **EXACT)
    train(a, [p], 5)
    train(b, [q], 5)
    assert relative(p, q) < 1e-11
    assert relative(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"] * 0.05) < 1e-13


def test_clip_does_not_scale_the_update():
    """CASES 2: with a constant gradient norm the step's size does not depend on max_norm."""
    sizes = []
    for max_norm in (1e-2, 1.0, 1e9):
        p = param(16, 32)
        optimizer = Muon([p], weight_decay=0.0, ns_dtype="float32")
        for step in range(3):
            before = p.detach().clone()
            grad = randn(16, 32, seed=step)
            p.grad = grad / grad.norm() * 5
            torch.nn.utils.clip_grad_norm_([p], max_norm)
            optimizer.step()
        sizes.append(float((p - before).norm()))
    assert sizes == pytest.approx([sizes[0]] * 3, rel=1e-4)


# Layouts and batches -----------------------------------------------------------------------------------------------

LAYOUTS = {
    "gate|up": MatrixLayout(rows=(20, 20)),
    "q|k|v": MatrixLayout(rows=(24, 8, 8)),
    "interleaved qkv": MatrixLayout(groups=4, rows=(6, 2, 2)),
    "row by row": MatrixLayout(groups=20, rows=(1, 1)),
    "one per head": MatrixLayout(rows=(10,) * 4),
}


@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=list(LAYOUTS))
@pytest.mark.parametrize("nesterov", [True, False])
def test_blocks_are_separate_parameters(layout, nesterov):
    fused = param(40, 16, dtype=torch.float64, layout=layout)
    assert layout_of(fused) == layout
    apart = [torch.nn.Parameter(block.clone()) for block in layout.split(fused.detach())]
    a = Muon([fused], lr=0.02, nesterov=nesterov, adjust_lr_fn="match_rms_adamw", **EXACT)
    b = Muon(apart, lr=0.02, nesterov=nesterov, adjust_lr_fn="match_rms_adamw", batch_bytes=0, **EXACT)
    for step in range(5):
        fused.grad = randn(40, 16, seed=step, dtype=torch.float64)
        for p, grad in zip(apart, layout.split(fused.grad)):
            p.grad = grad.clone()
        a.step()
        b.step()
        assert relative(fused, layout.join([p.detach() for p in apart])) < 1e-12
    assert a.stats.ns_calls == len(apart) and a.stats == b.stats
    # As one matrix the result is far away: the test would notice.
    whole = param(40, 16, dtype=torch.float64)
    train(Muon([whole], lr=0.02, adjust_lr_fn="match_rms_adamw", **EXACT), [whole], 5)
    assert relative(whole - randn(40, 16, dtype=torch.float64), fused - randn(40, 16, dtype=torch.float64)) > 0.1


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", 1e-5), ("bfloat16", 3e-2)])
def test_batched_is_looped(dtype, bound):
    """CASES 11: a stack of experts, batched, equals one at a time; in float64 to the last bits."""
    kind = torch.float64 if dtype == "float64" else torch.float32
    shapes = [(16, 24)] * 4 + [(24, 16)] * 2 + [(8, 8)] * 3 + [(5, 7)]
    runs = []
    for batch_bytes in (1 << 30, 20_000, 0):
        params = [param(*s, seed=i, dtype=kind) for i, s in enumerate(shapes)]
        optimizer = Muon(params, batch_bytes=batch_bytes, ns_dtype=dtype)
        train(optimizer, params, 3)
        runs.append(params)
        assert optimizer.stats.ns_calls == len(shapes)
    start = [param(*s, seed=i, dtype=kind) for i, s in enumerate(shapes)]
    for i, alone in enumerate(runs[2]):
        assert relative(runs[0][i] - start[i], alone - start[i]) < bound
        assert relative(runs[1][i] - start[i], alone - start[i]) < bound


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_unbatched_does_not_depend_on_the_others(ns_dtype):
    """What makes an update independent of the ownership plan; odd shapes, where batched kernels do differ in bits."""
    for m, n in [(5, 7), (33, 65), (16, 1)]:
        alone, among = param(m, n), [param(m, n), param(m, n, seed=1), param(m, n, seed=2)]
        train(Muon([alone], batch_bytes=0, ns_dtype=ns_dtype), [alone], 3)
        train(Muon(among, batch_bytes=0, ns_dtype=ns_dtype), among, 3)
        assert torch.equal(alone, among[0])


def test_batches_join_groups_of_other_rates():
    p, q = param(8, 12), param(8, 12, seed=1)
    both = Muon([{"params": [p], "lr": 0.1}, {"params": [q], "lr": 0.001, "weight_decay": 0.0}, {"params": []}],
                ns_dtype="float64")  # fmt: skip
    p1, q1 = param(8, 12), param(8, 12, seed=1)
    one, two = Muon([p1], lr=0.1, ns_dtype="float64"), Muon([q1], lr=0.001, weight_decay=0.0, ns_dtype="float64")
    for step in range(2):
        p.grad, q.grad = randn(8, 12, seed=step), randn(8, 12, seed=step + 9)
        p1.grad, q1.grad = p.grad.clone(), q.grad.clone()
        for optimizer in (both, one, two):
            optimizer.step()
    assert torch.allclose(p, p1, atol=1e-7) and torch.allclose(q, q1, atol=1e-7)
    assert both.stats.ns_calls == 2 and len(both.param_groups) == 3


class PeakBytes(TorchDispatchMode):
    """Most bytes of storage made inside the context that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.peak = WeakIdKeyDictionary(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inside = {id(t.untyped_storage()) for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        for t in tree_flatten(out)[0]:
            if isinstance(t, torch.Tensor) and id(storage := t.untyped_storage()) not in inside:
                if storage not in self.alive:
                    self.alive[storage] = True
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage.nbytes())
                self.peak = max(self.peak, self.now)
        return out

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ns_form", ["standard", "gram"])
@pytest.mark.parametrize("layout", [MatrixLayout(), MatrixLayout(groups=4, rows=(4, 2, 2))])
def test_temporaries_of_a_step_are_bounded(ns_dtype, ns_form, layout):
    """CASES 26."""
    params = [param(32, 64, seed=i, layout=layout) for i in range(10)]
    peaks = []
    for batch_bytes in (1 << 30, 100_000, 50_000):
        optimizer = Muon(params, batch_bytes=batch_bytes, ns_dtype=ns_dtype, ns_form=ns_form, momentum_dtype="bfloat16")
        train(optimizer, params, 1)  # makes the momentum
        with PeakBytes() as peak:
            optimizer.step()
        peaks.append(peak.peak)
        assert peak.peak <= batch_bytes
    # The bound binds: joined, the matrices would need more, and it is used, not dodged.
    assert peaks[0] > 100_000 and peaks[1] > 40_000 and peaks[2] > 20_000, peaks


def test_stats_are_of_the_last_step():
    p, q = param(8, 12, layout=MatrixLayout(rows=(4, 4))), param(12, 8)
    optimizer = Muon([p, q])
    settings = NewtonSchulz()
    expected = 2 * flops(4, 12, settings) + flops(12, 8, settings)
    for _ in range(2):
        train(optimizer, [p, q], 1)
        assert (optimizer.stats.ns_calls, optimizer.stats.ns_flops) == (3, expected)
    assert muon_flops([((8, 12), layout_of(p)), ((12, 8), layout_of(q))], settings) == expected
    p.grad = q.grad = None
    optimizer.step()
    assert optimizer.stats.ns_calls == 0


def test_pure_updates_are_the_optimizers():
    """What GatherMuon uses: momentum on shards of rows, the whole input through `orthogonalized_updates`."""
    layout = MatrixLayout(groups=2, rows=(6, 2))
    p = param(16, 12, layout=layout)
    optimizer = Muon([p], lr=0.1, ns_dtype="float32", adjust_lr_fn="match_rms_adamw")
    w, buffer = p.detach().clone(), torch.zeros(16, 12)
    for step in range(3):
        p.grad = randn(16, 12, seed=step)
        halves = [momentum_update(buffer[i : i + 8], p.grad[i : i + 8], 0.95) for i in (0, 8)]
        (update,) = orthogonalized_updates(
            [torch.cat(halves)], [layout], NewtonSchulz(dtype="float32"), "match_rms_adamw"
        )
        w = w * (1 - 0.1 * 0.1) - 0.1 * update
        optimizer.step()
    assert update.dtype == torch.float32 and torch.equal(buffer, optimizer.state[p]["momentum_buffer"])
    assert relative(w, p) < 1e-6


# Steps and state ---------------------------------------------------------------------------------------------------


def test_missing_gradients_change_nothing():
    p, q = param(4, 6), param(4, 6, seed=1)
    optimizer = Muon([p, q])
    train(optimizer, [p], 1)
    assert q not in optimizer.state and torch.equal(q, param(4, 6, seed=1))


def test_tensor_rate_and_closure():
    p, q = param(4, 6), param(4, 6)
    a, b = Muon([p], lr=torch.tensor(0.25)), Muon([q], lr=0.25)
    train(a, [p], 2)
    train(b, [q], 2)
    assert torch.equal(p, q)
    assert float(b.step(lambda: (q * 2).sum()).detach()) == float((p * 2).sum().detach())


def test_state_round_trip_is_bit_equal():
    p, q = param(8, 12), param(8, 12)
    a, b = Muon([("w", p)], lr=0.5), Muon([("w", q)], lr=0.1)
    train(a, [p], 3)
    with torch.no_grad():
        q.copy_(p)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert b.param_groups[0]["lr"] == 0.5 and b.param_groups[0]["param_names"] == ["w"]
    train(a, [p], 2)
    train(b, [q], 2)
    assert torch.equal(p, q)


def test_the_other_momentum_convention_is_refused():
    """CASES 12."""
    p, q = param(4, 6), param(4, 6)
    saved = Muon([p], momentum_form="heavy_ball")
    train(saved, [p], 1)
    with pytest.raises(ValueError, match="heavy_ball.*'ema'.*1 / \\(1 - momentum\\)"):
        Muon([q]).load_state_dict(saved.state_dict())
    torchs = torch.optim.Muon([q])
    train(torchs, [q], 1)
    with pytest.raises(ValueError, match="'ema'.*'heavy_ball'"):
        saved.load_state_dict(torchs.state_dict())
    ours = Muon([p])
    ours.load_state_dict(torchs.state_dict())
    assert torch.equal(ours.state[p]["momentum_buffer"], torchs.state[q]["momentum_buffer"])
    train(ours, [p], 1)


@pytest.mark.parametrize(("saved", "own"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_momentum_of_another_dtype_is_converted(saved, own):
    p, q = param(8, 12), param(8, 12)
    a, b = Muon([p], momentum_dtype=saved), Muon([q], momentum_dtype=own, ns_compile=True)
    train(a, [p], 2)
    assert a.state[p]["momentum_buffer"].dtype == getattr(torch, saved)
    b.load_state_dict(a.state_dict())
    loaded = b.state[q]["momentum_buffer"]
    assert loaded.dtype == getattr(torch, own) and b.param_groups[0]["momentum_dtype"] == own
    assert b.param_groups[0]["ns_compile"]  # of the machine, not of the saved run
    b.param_groups[0]["ns_compile"] = False
    assert relative(loaded, a.state[p]["momentum_buffer"]) < 4e-3
    train(b, [q], 1)


def test_bf16_momentum_stays_close():
    p, q = param(32, 48), param(32, 48)
    train(Muon([p], momentum_dtype="bfloat16", ns_dtype="float32", lr=0.02), [p], 5)
    train(Muon([q], ns_dtype="float32", lr=0.02), [q], 5)
    start = randn(32, 48)
    assert 0 < relative(p - start, q - start) < 2e-2


def test_a_users_factor_is_saved_by_name_only():
    p, q = param(4, 6), param(4, 6)
    a = Muon([p], adjust_lr_fn=lambda m, n: 3.0)
    train(a, [p], 1)
    state = a.state_dict()
    assert state["param_groups"][0]["adjust_lr_fn"] == "custom function"
    b = Muon([q], adjust_lr_fn=lambda m, n: 3.0)
    b.load_state_dict(state)
    assert b.param_groups[0]["adjust_lr_fn"](1, 1) == 3.0
    with pytest.raises(ValueError, match="its own adjust_lr_fn"):
        Muon([param(4, 6)]).load_state_dict(state)


def half_of_the_larger(m: int, n: int) -> float:
    return max(m, n) / 2


def test_a_factor_by_import_path_is_saved_by_value():
    path = f"{__name__}:half_of_the_larger"
    p, q = param(4, 6), param(4, 6)
    a, b = Muon([p], adjust_lr_fn=path), Muon([q], adjust_lr_fn=half_of_the_larger)
    train(a, [p], 2)
    train(b, [q], 2)
    assert torch.equal(p, q)
    again = Muon([param(4, 6)])
    again.load_state_dict(a.state_dict())
    assert again.param_groups[0]["adjust_lr_fn"] == path
    with pytest.raises(ValueError, match="gave nan for a matrix of 4 x 6"):
        lr_factor(lambda m, n: math.nan, 4, 6)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"lr": torch.zeros(2)}, "lr must be"),
        ({"lr": "0.1"}, "lr must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"nesterov": 1}, "nesterov must be true or false"),
        ({"momentum_form": "sgd"}, "ema, heavy_ball"),
        ({"momentum_dtype": "float16"}, "float32, bfloat16"),
        ({"adjust_lr_fn": "spectral"}, "original, match_rms_adamw, spectral_unclamped"),
        ({"ns_steps": 0}, "from 1 to 20"),
        ({"ns_steps": 100}, "from 1 to 20"),
        ({"eps": 0.0}, "eps"),
        ({"ns_coefficients": "keler"}, "keller, you, polar_express"),
        ({"ns_coefficients": [[9.0, 9.0, 9.0]]}, "do not converge"),
        ({"ns_form": "fast"}, "auto, standard, gram"),
        ({"ns_kernels": "triton"}, "torch, quack"),
        ({"ns_compile": "yes"}, "ns_compile must be true or false"),
        ({"ns_dtype": "half"}, "auto, float32"),
        ({"ns_dtype": "float16"}, "float16 is for CUDA"),
        ({"adjust_lr_fn": "math:no_such"}, "adjust_lr_fn 'math:no_such' cannot be imported"),
        ({"adjust_lr_fn": "no_such_module:f"}, "'no_such_module:f' cannot be imported"),
        ({"adjust_lr_fn": "math:pi"}, "'math:pi' is a float, expected a function"),
        ({"adjust_lr_fn": lambda m, n: m - n}, "gave 0 for a matrix of 4 x 4, expected a positive number"),
        ({"row_beta": 1.0}, "row_beta must be"),
        ({"cautious_weight_decay": "yes"}, "cautious_weight_decay must be"),
        ({"batch_bytes": -1}, "batch_bytes"),
    ],
)
def test_refused_at_construction(kwargs, words):
    """CASES 29, whether given for all groups or for one."""
    with pytest.raises(ValueError, match=words):
        Muon([param(4, 4)], **kwargs)
    if "batch_bytes" not in kwargs:
        optimizer = Muon([param(4, 4)])
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group({"params": [param(4, 4)], **kwargs})
        assert len(optimizer.param_groups) == 1


def test_parameters_that_are_no_matrices_are_refused():
    with pytest.raises(ValueError, match=r"bias: .*2-D parameters, got shape \(4,\)"):
        Muon([("bias", torch.nn.Parameter(torch.zeros(4)))])
    with pytest.raises(ValueError, match=r"got shape \(2, 3, 4\)"):
        Muon([torch.nn.Parameter(torch.zeros(2, 3, 4))])
    with pytest.raises(ValueError, match="float32, got torch.bfloat16"):
        Muon([torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match="cover 4608 rows"):  # CASES 7: four blocks met a three-block split
        set_layout(param(4864, 2), MatrixLayout(rows=(2048, 2048, 512)))
