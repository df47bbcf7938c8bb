"""Newton-Schulz against references: both forms, tables, batches, dtypes, FLOPs, refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from tests.reference import newton_schulz, newton_schulz_by_svd
from torchtitan_dmuon.newton_schulz import (
    COEFFICIENTS,
    GUARD_EPS,
    NewtonSchulz,
    choose_form,
    compute_dtype,
    flops,
    orthogonalize,
)

SHAPES = [(64, 64), (24, 96), (96, 24), (1, 16), (16, 1), (1, 1), (33, 65), (65, 33), (7, 5)]
FP64 = NewtonSchulz(dtype="float64")


def randn(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def conditioned(m: int, n: int, condition: float) -> torch.Tensor:
    """A float64 matrix whose singular values fall geometrically from 1 to 1 / condition."""
    s = min(m, n)
    u = torch.linalg.qr(randn(m, s, dtype=torch.float64))[0]
    v = torch.linalg.qr(randn(n, s, seed=1, dtype=torch.float64))[0]
    return u @ torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), s, dtype=torch.float64).diag() @ v.T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("table", list(COEFFICIENTS))
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_both_forms_are_the_polynomial(shape, table, steps, form):
    settings = NewtonSchulz(dtype="float64", form=form, coefficients=table, steps=steps)
    assert len(settings.table) == steps
    x = randn(*shape, dtype=torch.float64)
    assert relative(orthogonalize(x, settings), newton_schulz(x, settings.table)) < 1e-12
    # Through an SVD the two differ by its own rounding, amplified by the polynomial's slope at zero.
    assert relative(orthogonalize(x, settings), newton_schulz_by_svd(x, settings.table)) < 1e-9


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e15])
def test_bit_equal_to_torch_in_bf16(shape, scale):
    x = randn(*shape) * scale
    expected = _zeropower_via_newtonschulz(x.clone(), COEFFICIENTS["keller"][0], 5, 1e-7)
    assert torch.equal(orthogonalize(x, NewtonSchulz(dtype="bfloat16", form="standard")), expected)


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("form", ["standard", "gram"])
def test_batch_is_loop(dtype, bound, form):
    settings = NewtonSchulz(dtype=dtype, form=form)
    for m, n in SHAPES:
        stack = randn(4, m, n)
        loop = torch.stack([orthogonalize(x, settings) for x in stack])
        assert relative(orthogonalize(stack, settings), loop) < bound
        assert torch.equal(orthogonalize(stack[:1], settings), loop[:1])


@pytest.mark.parametrize("condition", [1, 1e1, 1e2, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("table", list(COEFFICIENTS))
@pytest.mark.parametrize("shape", [(48, 48), (32, 128)])
def test_gram_is_standard_over_condition_numbers(condition, table, shape):
    """In fp64 the same; in bf16 the Gram form costs accuracy, a few times standard's own error, and never blows up."""
    x = conditioned(*shape, condition)
    gram, standard = (NewtonSchulz(form=form, coefficients=table, dtype="float64") for form in ("gram", "standard"))
    exact = orthogonalize(x, standard)
    assert relative(orthogonalize(x, gram), exact) < 1e-12
    gram, standard = replace(gram, dtype="bfloat16"), replace(standard, dtype="bfloat16")
    exact = newton_schulz(x.bfloat16(), standard.table)
    error = relative(orthogonalize(x, standard), exact)
    assert relative(orthogonalize(x, gram), exact) < 2e-2 + 4 * error
    # A second restart buys standard's accuracy back.
    assert relative(orthogonalize(x, replace(gram, restarts=(2, 4))), exact) < 2e-2 + 1.2 * error


def test_without_a_restart_gram_fails_in_bf16():
    """Why the default has one: the small matrices lose the small singular values, which then grow without bound."""
    x = conditioned(32, 128, 1e4)
    exact = newton_schulz(x.bfloat16(), NewtonSchulz().table)
    assert relative(orthogonalize(x, NewtonSchulz(form="gram", dtype="bfloat16", restarts=())), exact) > 5


def test_zero_matrix_is_zero_and_alone():
    for dtype, form in itertools.product(("float32", "bfloat16", "float64"), ("standard", "gram")):
        settings = NewtonSchulz(dtype=dtype, form=form)
        assert not orthogonalize(torch.zeros(8, 8), settings).any()
        stack = randn(4, 8, 8)
        before = orthogonalize(stack, settings)
        stack[2] = 0
        after = orthogonalize(stack, settings)
        assert not after[2].any()
        assert all(torch.equal(after[i], before[i]) for i in (0, 1, 3))


def test_strides_do_not_matter_and_the_input_is_kept():
    for dtype in ("float32", "bfloat16"):
        settings = NewtonSchulz(dtype=dtype)
        for view in (randn(40, 24).T, randn(48, 80)[::2, ::2], randn(3, 40, 24).mT, randn(6, 24, 40)[::2],
                     randn(24, 40).bfloat16()):  # fmt: skip
            kept = view.clone()
            assert torch.equal(orthogonalize(view, settings), orthogonalize(kept.contiguous(), settings))
            assert torch.equal(view, kept)


def test_eps_guard_makes_scale_irrelevant():
    x = randn(64, 64)
    torch_eps, guard = NewtonSchulz(dtype="float32"), NewtonSchulz(dtype="float32", eps=GUARD_EPS)
    expected = orthogonalize(x, guard)
    for exponent in range(0, 44):  # powers of two scale without rounding, so the bits must not change
        assert torch.equal(orthogonalize(x * 2.0**-exponent, guard), expected)
    assert relative(orthogonalize(x * 1e-12, guard), expected) < 1e-3
    # Torch's value is the default, and does depend on scale once the norm nears it.
    norms = [float(orthogonalize(x / x.norm() * scale, torch_eps).norm()) for scale in (1.0, 1e-9, 1e-10)]
    assert norms[0] > 1.2 * norms[1] > 4 * norms[2], norms


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_flops_are_counted(form, steps):
    settings = NewtonSchulz(form=form, dtype="float32", steps=steps)
    for m, n in [(16, 16), (16, 64), (48, 24)]:
        with FlopCounterMode(display=False) as counter:
            orthogonalize(randn(m, n), settings)
        assert counter.get_total_flops() == flops(m, n, settings)
        with FlopCounterMode(display=False) as counter:
            orthogonalize(randn(3, m, n), settings)
        assert counter.get_total_flops() == 3 * flops(m, n, settings)
    assert flops(10, 20, NewtonSchulz(form="standard")) == 5 * (4 * 100 * 20 + 2 * 1000)
    assert flops(10, 20, NewtonSchulz(form="gram")) == 4 * 2 * 100 * 20 + 2 * 1000 * (20 - 6)


def test_auto_form():
    """Gram in fp32 on wide and tall matrices alone; FLOPs are of the form that runs; the other forms are kept."""
    exact, low, auto = NewtonSchulz(dtype="float32"), NewtonSchulz(dtype="bfloat16"), NewtonSchulz()
    for device in ("cpu", "cuda"):
        assert [choose_form(64, n, exact, device) for n in (64, 128, 192, 256)] == ["standard"] * 2 + ["gram"] * 2
        assert [choose_form(128, n, exact, device) for n in (128, 192, 256)] == ["standard"] * 2 + ["gram"]
        assert choose_form(256, 64, exact, device) == "gram"
        assert choose_form(64, 256, low, device) == "standard"
        assert choose_form(64, 256, replace(exact, form="standard"), device) == "standard"
        assert choose_form(64, 64, replace(low, form="gram"), device) == "gram"
    assert choose_form(64, 256, auto, "cuda") == "standard"
    assert choose_form(64, 256, NewtonSchulz(dtype="float16"), "cpu") == "standard"  # a plan may ask from a laptop
    for m, n in ((24, 24), (24, 96)):
        for settings in (exact, low):
            with FlopCounterMode(display=False) as counter:
                orthogonalize(randn(m, n), settings)
            assert counter.get_total_flops() == flops(m, n, settings)


def test_a_measured_table_chooses_the_form():
    """By shape in either orientation; what was not measured keeps the rule."""
    settings = NewtonSchulz(dtype="float32", form={"64x64": "gram", "256x64": "standard"})
    assert settings == NewtonSchulz(dtype="float32", form=(("64x256", "standard"), ("64x64", "gram")))
    chosen = {s: choose_form(*s, settings, "cpu") for s in [(64, 64), (64, 256), (256, 64), (32, 128), (32, 32)]}
    assert list(chosen.values()) == ["gram", "standard", "standard", "gram", "standard"]
    x = randn(64, 64)
    assert torch.equal(orthogonalize(x, settings), orthogonalize(x, replace(settings, form="gram")))
    assert flops(64, 64, settings) == flops(64, 64, replace(settings, form="gram"))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"form": {"64x64": "fast"}}, "with a form of auto, standard, gram; got '64x64': 'fast'"),
        ({"form": {"64": "gram"}}, "got '64': 'gram'"),
        ({"form": 3}, "must be a name or a table"),
        ({"steps": 0}, "from 1 to 20"),
        ({"steps": 100}, "from 1 to 20"),
        ({"steps": True}, "from 1 to 20"),
        ({"steps": 2.0}, "from 1 to 20"),
        ({"eps": 0.0}, "eps"),
        ({"eps": -1e-7}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"coefficients": "kellar"}, "keller, you, polar_express"),
        ({"coefficients": [[1.0, 2.0]]}, r"\[a, b, c\]"),
        ({"coefficients": []}, r"\[a, b, c\]"),
        ({"coefficients": [[3.0, -3.0, 3.0]]}, "do not converge"),  # leaves (0, 2)
        ({"coefficients": [[1.0, 0.0, 0.0]]}, "do not converge"),  # stands still
        ({"coefficients": [[3.4445, -4.7750, 2.0315], [0.9, 0.0, 0.0]]}, "do not converge"),
        ({"form": "gramm"}, "auto, standard, gram"),
        ({"dtype": "fp16"}, "auto, float32, bfloat16, float16"),
        ({"restarts": (0,)}, "restarts"),
        ({"restarts": (3, 2)}, "restarts"),
    ],
)
def test_refused_at_construction(kwargs, words):
    with pytest.raises(ValueError, match=words):
        NewtonSchulz(**kwargs)


def test_user_tables():
    cubic = NewtonSchulz(coefficients=[1.5, -0.5, 0], steps=15, dtype="float64")
    assert cubic.table == ((1.5, -0.5, 0.0),) * 15
    assert hash(cubic) == hash(NewtonSchulz(coefficients=((1.5, -0.5, 0.0),), steps=15, dtype="float64"))
    x = randn(8, 16)
    q = orthogonalize(x, cubic)
    assert torch.allclose(q @ q.T, torch.eye(8, dtype=q.dtype), atol=1e-6)
    two = NewtonSchulz(coefficients=[[3.4445, -4.7750, 2.0315], [1.5, -0.5, 0]], steps=4)
    assert two.table[1:] == ((1.5, -0.5, 0.0),) * 3


def test_dtypes_and_refusals():
    assert orthogonalize(randn(4, 4), FP64).dtype == torch.float64
    assert compute_dtype(NewtonSchulz(), "cuda") == torch.bfloat16
    assert compute_dtype(NewtonSchulz(), "cpu") in (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="float16 is for CUDA"):
        orthogonalize(randn(4, 4), NewtonSchulz(dtype="float16"))
    half = NewtonSchulz(dtype="float16")
    assert compute_dtype(half, "cuda") == compute_dtype(half, "meta") == torch.float16
    for device in ("cpu", "mps", "xpu"):
        with pytest.raises(ValueError, match=f"or auto on {device}"):
            compute_dtype(half, device)
    for bad in (randn(4), randn(1, 2, 3, 4), torch.zeros(0, 4), torch.zeros(4, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="orthogonalize needs"):
            orthogonalize(bad, FP64)
