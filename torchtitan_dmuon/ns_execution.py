"""What runs Newton-Schulz: torch's kernels, torch.compile, or symmetric kernels where they prove right.

Decides: how the program of a shape is executed. Does not decide the polynomial (`newton_schulz.py`). Keeps: kernels
that are not torch's run a shape only after a check of their numbers there. The check is a function of shape, settings
and kind of device, so that ranks with equal devices decide alike.

Shape suffixes: B batch; M rows, N columns.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from torchtitan_dmuon import newton_schulz
from torchtitan_dmuon.newton_schulz import NewtonSchulz, Products, Program, run

logger = logging.getLogger(__name__)

# The error of kernels may be this many times that of torch's in the same dtype, and one rounding more.
ERROR_RATIO = 1.5
# Smaller matrices do not fill a tile of a symmetric kernel; the limit of gram-newton-schulz.
SMALLEST_SIDE = 256


def _quack() -> Products:
    """Products of symmetric results that compute one half and mirror it; quack-kernels, `quack/gemm_interface.py`."""
    from quack.gemm_interface import gemm_symmetric

    return Products(
        product=lambda a, b, out: gemm_symmetric(a, b, out=out),
        add_product=lambda c, a, b, beta, alpha, out: gemm_symmetric(a, b, C=c, out=out, alpha=alpha, beta=beta),
    )


KERNELS: dict[str, Callable[[], Products] | None] = {"torch": None, "quack": _quack}


@dataclass(frozen=True)
class Execution:
    """Hashable, so that matrices executed alike can share a batch.

    ``kernels``: a name of :data:`KERNELS`, of what computes the symmetric products of a shape that passes
    :func:`verdict`; the wide products are always torch's. ``compile``: through torch.compile, one graph for single
    matrices of a shape and one for batches of any size.

    Raises ValueError, naming the allowed values, for anything else.
    """

    kernels: str = "torch"
    compile: bool = False

    def __post_init__(self) -> None:
        if self.kernels not in KERNELS:
            raise ValueError(f"ns_kernels must be one of {', '.join(KERNELS)}, got {self.kernels!r}")
        if not isinstance(self.compile, bool):
            raise ValueError(f"ns_compile must be true or false, got {self.compile!r}")

    def check(self, device: torch.device | str) -> None:
        """Raise ValueError where this cannot run, on this device or at all; "meta" stands for one not known yet."""
        if self.compile and "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
            raise ValueError(f"ns_compile = true needs torch 2.14 or later, found {torch.__version__}; leave it false")
        device = torch.device(device)
        if self.kernels == "torch" or device.type == "meta":
            return
        found = device.type
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            found = f"capability {capability[0]}.{capability[1]}"
        if device.type != "cuda" or capability < (9, 0):
            raise ValueError(
                f'ns_kernels = "{self.kernels}" needs a CUDA device of capability 9.0 (Hopper) or later, '
                f'found {found}; use "torch"'
            )
        if importlib.util.find_spec("quack") is None:
            raise ValueError(
                f'ns_kernels = "{self.kernels}" needs the package quack-kernels: '
                'pip install "torchtitan_dmuon[kernels]", or use "torch"'
            )


TORCH = Execution()


def orthogonalize(x: torch.Tensor, settings: NewtonSchulz, execution: Execution = TORCH) -> torch.Tensor:
    """:func:`newton_schulz.orthogonalize`, executed as asked."""
    products = _products_for(execution.kernels, *x.shape[-2:], settings, x.device)
    runner = _run_compiled if execution.compile else run
    return newton_schulz.orthogonalize(x, settings, functools.partial(runner, products=products))


def _run_compiled(x: torch.Tensor, program: Program, products: Products | None) -> torch.Tensor:
    x = x.contiguous()  # `run` would do it; other strides would be other graphs
    if x.ndim == 3:
        torch._dynamo.mark_dynamic(x, 0)
    return _compiled(program, products, x.shape[-2:], x.ndim, x.dtype, x.device)(x)


@functools.cache
def _compiled(
    program: Program,
    products: Products | None,
    shape_MN: torch.Size,
    ndim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A compiled function for one kind of input. Kinds do not share a limit of recompiles, and with ``fullgraph``
    reaching one is an error instead of eager execution."""
    what = "one matrix" if ndim == 2 else "batches"
    logger.info("Newton-Schulz of %s of %dx%d in %s will be compiled", what, *shape_MN, program.dtype)
    whole = functools.partial(run, program=program, products=products)
    return torch.compile(whole, fullgraph=True, isolate_recompiles=True)  # type: ignore[call-overload]


@functools.cache
def _products_for(kernels: str, m: int, n: int, settings: NewtonSchulz, device: torch.device) -> Products | None:
    """The kernels' products for a shape that they are right for; None for torch's. Logs each verdict once."""
    make = KERNELS[kernels]
    if make is None or min(m, n) < SMALLEST_SIDE:
        return None
    products = make()
    accepted, why = verdict(m, n, settings, device, products)
    used = "accepted" if accepted else "rejected, torch's run instead"
    logger.info("Newton-Schulz of %dx%d: kernels of %s %s: %s", m, n, kernels, used, why)
    return products if accepted else None


def verdict(m: int, n: int, settings: NewtonSchulz, device: torch.device, products: Products) -> tuple[bool, str]:
    """Whether ``products`` are as good as torch's for matrices of a shape, and the figures or the failure that say so.

    Two matrices, the second ill-conditioned, are orthogonalized by both and compared with torch's float32. They and
    their temporaries exist beside those of a step.
    """
    noise = torch.randn(2, m, n, generator=torch.Generator().manual_seed(0))
    noise[1] *= torch.logspace(0, -3, n)
    x_BMN = noise.to(device)
    exact_BMN = newton_schulz.orthogonalize(x_BMN, replace(settings, dtype="float32", form="standard"))

    def error(update_BMN: torch.Tensor) -> float:
        off, size = (torch.linalg.vector_norm(t, dim=(1, 2)) for t in (update_BMN.float() - exact_BMN, exact_BMN))
        return float((off / size).max())

    plain_BMN = newton_schulz.orthogonalize(x_BMN, settings)
    allowed = ERROR_RATIO * error(plain_BMN) + torch.finfo(plain_BMN.dtype).eps
    try:
        found = error(newton_schulz.orthogonalize(x_BMN, settings, functools.partial(run, products=products)))
    except Exception as failure:  # whatever foreign kernels raise for a shape that they do not take
        return False, f"{type(failure).__name__}: {failure}"
    return found <= allowed, f"relative error {found:.2e}, allowed {allowed:.2e}"
