"""What runs Newton-Schulz: compiled is eager, within bounded graphs; kernels run only where their numbers are right."""

from __future__ import annotations

import functools
import logging
import shutil

import pytest
import torch
import torch._dynamo  # noqa: F401  (where torch.compile begins)

from torchtitan_dmuon import ns_execution
from torchtitan_dmuon.muon import Muon
from torchtitan_dmuon.newton_schulz import TORCH_PRODUCTS, NewtonSchulz, Products, orthogonalize
from torchtitan_dmuon.ns_execution import KERNELS, Execution
from torchtitan_dmuon.titan.gather_muon import GatherMuon

COMPILED = Execution(compile=True)
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


# Compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler for CPU")
def test_compiled_steps_are_eager_ones():
    """Of both optimizers, which share the graph of their shape."""
    weights = {}
    for name, cls, compiled in (("eager", Muon, False), ("compiled", Muon, True), ("gathering", GatherMuon, True)):
        params = [torch.nn.Parameter(randn(24, 40, seed=i)) for i in range(3)]
        optimizer = cls(params, lr=0.1, ns_dtype="float32", ns_compile=compiled)
        for step in range(2):
            for i, p in enumerate(params):
                p.grad = randn(24, 40, seed=10 * step + i)
            optimizer.step()
        weights[name] = torch.stack([p.detach() for p in params])
    assert relative(weights["compiled"], weights["eager"]) < 1e-5
    assert relative(weights["gathering"], weights["eager"]) < 1e-5


def test_one_graph_for_single_matrices_of_a_shape_and_one_for_batches(monkeypatch):
    """And never eager: with one limit of recompiles for all shapes, torch gives up after eight."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    settings = NewtonSchulz(dtype="float32", steps=1, eps=1e-6)
    for n in range(9, 19):
        single = randn(1, 8, n)
        assert relative(ns_execution.orthogonalize(single, settings, COMPILED), orthogonalize(single, settings)) < 1e-6
    assert len(graphs) == 10
    for batch in (5, 2, 3):
        stack = randn(batch, 8, 9)
        for x in (stack, stack.mT.contiguous().mT):
            assert relative(ns_execution.orthogonalize(x, settings, COMPILED), orthogonalize(stack, settings)) < 1e-6
    assert len(graphs) == 11


# Kernels -----------------------------------------------------------------------------------------------------------


def kernels(monkeypatch, name: str, products: Products) -> Execution:
    """An execution by kernels of a name that no other test uses, since verdicts are kept."""
    monkeypatch.setitem(KERNELS, name, lambda: products)
    return Execution(kernels=name)


def counting(calls: list[int]) -> Products:
    def add_product(c, a, b, beta, alpha, out):
        calls.append(1)
        return TORCH_PRODUCTS.add_product(c, a, b, beta, alpha, out)

    return Products(TORCH_PRODUCTS.product, add_product)


def lossy(*args) -> torch.Tensor:
    """A product rounded to three bits."""
    out = TORCH_PRODUCTS.add_product(*args)
    mantissa, exponent = torch.frexp(out)
    return out.copy_(torch.ldexp((mantissa * 8).round() / 8, exponent))


def failing(*_args) -> torch.Tensor:
    raise RuntimeError("no kernel for this shape")


@pytest.mark.parametrize("form", ["standard", "gram"])
def test_right_kernels_are_used_for_large_matrices_and_reported_once(form, monkeypatch, caplog):
    calls: list[int] = []
    execution = kernels(monkeypatch, f"right, {form}", counting(calls))
    settings = NewtonSchulz(dtype="float32", form=form)
    with caplog.at_level(logging.INFO, logger=ns_execution.__name__):
        for batch in (2, 1):
            x = randn(batch, 256, 264)
            calls.clear()
            assert torch.equal(ns_execution.orthogonalize(x, settings, execution), orthogonalize(x, settings))
            assert calls
    (line,) = caplog.messages
    assert f"of 256x264: kernels of right, {form} accepted: relative error" in line
    calls.clear()
    ns_execution.orthogonalize(randn(2, 255, 264), settings, execution)
    assert not calls


@pytest.mark.parametrize(
    ("name", "product", "why"), [("lossy", lossy, "relative error"), ("failing", failing, "RuntimeError: no kernel")]
)
def test_wrong_kernels_are_rejected_and_reported(name, product, why, monkeypatch, caplog):
    execution = kernels(monkeypatch, name, Products(TORCH_PRODUCTS.product, product))
    settings, x = NewtonSchulz(dtype="float32"), randn(2, 256, 256)
    with caplog.at_level(logging.INFO, logger=ns_execution.__name__):
        assert torch.equal(ns_execution.orthogonalize(x, settings, execution), orthogonalize(x, settings))
    (line,) = caplog.messages
    assert f"of 256x256: kernels of {name} rejected, torch's run instead: {why}" in line


def test_a_verdict_is_the_same_on_every_rank():
    """It depends on neither what the rank drew before nor its gradients: replicas that repeat an update agree."""
    verdicts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        products = Products(TORCH_PRODUCTS.product, lossy)  # whose error, in the verdict's words, tells inputs apart
        verdicts.append(ns_execution.verdict(256, 256, NewtonSchulz(dtype="float32"), CPU, products))
    assert verdicts[0] == verdicts[1]


def test_kernels_that_cannot_run_are_refused(monkeypatch):
    quack = Execution(kernels="quack")
    quack.check("meta")
    with pytest.raises(ValueError, match=r"needs a CUDA device of capability 9\.0 \(Hopper\) or later, found cpu"):
        quack.check("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with pytest.raises(ValueError, match=r"found capability 8\.0"):
        quack.check("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(ns_execution.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"pip install \"torchtitan_dmuon\[kernels\]\""):
        quack.check("cuda")


@pytest.mark.parametrize(
    "dtype, form, gram, left", [("bfloat16", "auto", 0, 2), ("bfloat16", "gram", 3, 0), ("float32", "auto", 2, 0)]
)
def test_the_log_says_what_auto_leaves_to_the_gram_form_in_16_bits(dtype, form, gram, left) -> None:
    from torchtitan_dmuon.titan.optimizer import describe_optimizer

    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((64, 64), (64, 256), (256, 512))]
    first, *more = describe_optimizer(GatherMuon(weights, ns_dtype=dtype, ns_form=form), None)
    assert f"({gram} in the Gram form)" in first
    assert [f"{left} of them take fewer FLOPs in the Gram form" in line for line in more] == [True] * bool(left)
