"""Newton-Schulz orthogonalization, as pure functions over batches of equal-shape matrices.

Decides: the polynomial (coefficient tables, steps), its form (standard or Gram), its dtype, how the input is
normalized, and what it costs in FLOPs and bytes. Does not decide which matrices exist, when they run, by which kernels
(`ns_execution.py`), or what is done with the result. Keeps: the choice of form is a function of shape, settings and
device type only, so that all ranks choose alike, and a matrix never influences its neighbours in a batch.

Shape suffixes: B batch; M rows, N columns; S = min(M, N), L = max(M, N).

    standard, per step                      Gram, per run of steps between restarts
    A_SS = X X^T                            R_SS = X X^T, Q_SS = I
    U_SS = b A + c A^2                      per step: Z = b R + c R^2;  Q <- (a I + Z) Q;  R <- (a I + Z)^2 R
    X_SL <- a X + U X                       X_SL <- Q X
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

Coefficients = tuple[tuple[float, float, float], ...]

MAX_STEPS = 20
# Small enough to guard the division alone: the result no longer depends on the input's scale, unlike torch's 1e-7.
GUARD_EPS = 1e-30

# What a batch works on at once on a CPU: 2 MiB took up to a tenth longer, 64 MiB up to 1.4 times as long.
CPU_BATCH_BYTES = 2**22

# One (a, b, c) per step; a run longer than its table repeats the last row, a shorter one stops early.
COEFFICIENTS: dict[str, Coefficients] = {
    # Keller Jordan's Muon post, https://kellerjordan.github.io/posts/muon/; torch.optim.Muon's default.
    "keller": ((3.4445, -4.7750, 2.0315),),
    # YouJiacheng's five-step table, as in dion and gram-newton-schulz ("YOU_COEFFICIENTS").
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express, arXiv 2505.16932, the first five rows of its table, each divided by (1.05, 1.05^3, 1.05^5) as in
    # gram-newton-schulz, so that rounding cannot push a singular value past the interval the rows are made for.
    "polar_express": tuple(
        (a / 1.05, b / 1.05**3, c / 1.05**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        )
    ),
}

FORMS = ("auto", "standard", "gram")
FormTable = tuple[tuple[str, str], ...]  # ("MxN" with M <= N, form), sorted
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class NewtonSchulz:
    """Settings of one orthogonalization; hashable, so that equal settings can share a batch.

    ``coefficients``: a name of :data:`COEFFICIENTS`, one (a, b, c), or a sequence of them, one per step (the last is
    repeated when ``steps`` is larger). ``form``: one of :data:`FORMS`, or a table {"MxN": form} of measured choices,
    either orientation, where what is missing is "auto". ``dtype``: of the products; "auto" is bfloat16 on CUDA and on
    CPUs with bf16 instructions, else float32; float16 is refused off CUDA (10 to 400 times slower on CPU); float64 is
    for references. ``eps``: lower bound of the norm that divides the input (:data:`GUARD_EPS` for scale independence).
    ``restarts``: Gram form only, the steps after which the small matrices are recomputed from X.

    Raises ValueError, naming the allowed values, for anything else.
    """

    steps: int = 5
    coefficients: str | Coefficients = "keller"
    form: str | FormTable = "auto"
    dtype: str = "auto"
    eps: float = 1e-7
    restarts: tuple[int, ...] = (2,)

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or not 1 <= self.steps <= MAX_STEPS:
            raise ValueError(f"Newton-Schulz steps must be an integer from 1 to {MAX_STEPS}, got {self.steps!r}")
        if not _is_number(self.eps) or not 0 < self.eps < 1:
            raise ValueError(
                f"Newton-Schulz eps must be a number in (0, 1), got {self.eps!r}; torch's value is 1e-7, "
                f"and {GUARD_EPS} only guards the division"
            )
        if not isinstance(self.form, str):
            object.__setattr__(self, "form", _checked_forms(self.form))
        elif self.form not in FORMS:
            raise ValueError(f"Newton-Schulz form must be one of {', '.join(FORMS)}, got {self.form!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"Newton-Schulz dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        object.__setattr__(self, "restarts", tuple(self.restarts))
        if any(not isinstance(r, int) or r < 1 for r in self.restarts) or list(self.restarts) != sorted(
            set(self.restarts)
        ):
            raise ValueError(f"Newton-Schulz restarts must be increasing step numbers from 1, got {self.restarts}")
        if isinstance(self.coefficients, str):
            if self.coefficients not in COEFFICIENTS:
                raise ValueError(
                    f"Newton-Schulz coefficients must be one of {', '.join(COEFFICIENTS)} or a list of [a, b, c], "
                    f"got {self.coefficients!r}"
                )
        else:
            object.__setattr__(self, "coefficients", _checked_table(self.coefficients))

    @property
    def table(self) -> Coefficients:
        """Exactly ``steps`` rows of (a, b, c)."""
        rows = COEFFICIENTS[self.coefficients] if isinstance(self.coefficients, str) else self.coefficients
        return (rows + rows[-1:] * self.steps)[: self.steps]

    def runs(self) -> tuple[Coefficients, ...]:
        """The table cut at the Gram form's restarts."""
        cuts = [0, *(r for r in self.restarts if r < self.steps), self.steps]
        return tuple(self.table[start:stop] for start, stop in zip(cuts, cuts[1:]))


class Products(NamedTuple):
    """What computes the symmetric S x S products, for matrices and batches, into ``out``; the wide ones are torch's.

    ``product``: (a, b, out) -> a b. ``add_product``: (c, a, b, beta, alpha, out) -> beta c + alpha a b; ``out`` is none
    of the others. Both results are symmetric up to rounding.
    """

    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    add_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, float, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Program:
    """What :func:`run` does to matrices of one shape: settings resolved into constants."""

    form: str
    runs: tuple[Coefficients, ...]  # one run in the standard form
    dtype: torch.dtype
    eps: float


Runner = Callable[[torch.Tensor, Program], torch.Tensor]


def program_for(m: int, n: int, settings: NewtonSchulz, device: torch.device) -> Program:
    """The program of matrices of m rows and n columns. Raises ValueError for float16 off CUDA."""
    form = choose_form(m, n, settings, device.type)
    runs = settings.runs() if form == "gram" else (settings.table,)
    return Program(form, runs, compute_dtype(settings, device), settings.eps)


def orthogonalize(x: torch.Tensor, settings: NewtonSchulz, runner: Runner | None = None) -> torch.Tensor:
    """Push every singular value of each matrix towards one: roughly U V^T of X = U S V^T.

    ``x``: [M, N] or [B, M, N], any floating dtype and strides; not modified. Returns the same shape in the dtype of
    :func:`compute_dtype`. As in torch.optim.Muon, the input is cast and then divided by max(norm, eps), each matrix by
    its own Frobenius norm; a zero matrix gives exactly zero. float16 alone is normalized in float32 before the cast,
    because its range ends at 65504. A single matrix runs the 2-D kernels (and is then bit-equal to torch.optim.Muon in
    bfloat16), a batch the 3-D ones. ``runner``: :func:`run`, or another execution of it (`ns_execution.py`).

    Raises ValueError for another number of dimensions, an empty dimension, an integer dtype, or float16 off CUDA.
    """
    if x.ndim not in (2, 3) or x.shape[-1] == 0 or x.shape[-2] == 0 or not x.dtype.is_floating_point:
        raise ValueError(f"orthogonalize needs a floating [M, N] or [B, M, N] tensor, got {x.dtype} {tuple(x.shape)}")
    m, n = x.shape[-2:]
    if x.ndim == 3 and x.shape[0] == 1:
        return orthogonalize(x[0], settings, runner)[None]
    if x.ndim == 3 and x.device.type == "cpu":
        some = max(1, CPU_BATCH_BYTES // workspace_bytes(m, n, settings, x.device))
        if some < x.shape[0]:
            return torch.cat([orthogonalize(part, settings, runner) for part in x.split(some)])
    return (runner or run)(x, program_for(m, n, settings, x.device))


def run(x: torch.Tensor, program: Program, products: Products | None = None) -> torch.Tensor:
    """The polynomial of a matrix [M, N] or of each of a batch [B, M, N], whose temporaries exist all at once."""
    products = products or TORCH_PRODUCTS
    m, n = x.shape[-2:]
    x = _normalized(x, program.dtype, program.eps)
    if m > n:
        x = x.mT
    for rows in program.runs:
        x = _gram_run(x, rows, products) if program.form == "gram" else _standard_run(x, rows, products)
    return x.mT if m > n else x


@functools.cache
def choose_form(m: int, n: int, settings: NewtonSchulz, device_type: str) -> str:
    """ "standard" or "gram" for a matrix of m rows and n columns; the same on every rank.

    "auto" is the Gram form where the products run in float32 or float64 and it saves enough FLOPs to be faster (at 5
    steps: from an aspect of 2, for matrices smaller than 128 of 2.3), and it costs no accuracy that counts. In 16 bits
    it is standard: there the Gram form's error is up to four times larger, and torch's bits stay (docs/numerics.md).
    """
    if not isinstance(settings.form, str):
        measured = dict(settings.form).get(f"{min(m, n)}x{max(m, n)}", "auto")
        return choose_form(m, n, replace(settings, form=measured), device_type)
    if settings.form != "auto":
        return settings.form
    if settings.dtype in ("bfloat16", "float16") or compute_dtype(settings, device_type).itemsize < 4:
        return "standard"
    return "gram" if gram_saves(m, n, settings) else "standard"


def gram_saves(m: int, n: int, settings: NewtonSchulz) -> bool:
    """Whether the Gram form has so many FLOPs less that it is faster in float32."""
    gain = _flops_of("standard", m, n, settings) / _flops_of("gram", m, n, settings)
    return gain >= (1.1 if min(m, n) >= 128 else 1.2)


def flops(m: int, n: int, settings: NewtonSchulz, device_type: str = "cpu") -> int:
    """FLOPs of :func:`orthogonalize` for one matrix, 2 per multiply-add: exactly what FlopCounterMode counts.

    Standard, T steps: T (4 s^2 l + 2 s^3). Gram with K restarts: 4 (K+1) s^2 l + 2 s^3 (4T - 3(K+1)).
    """
    return _flops_of(choose_form(m, n, settings, device_type), m, n, settings)


@functools.cache
def _flops_of(form: str, m: int, n: int, settings: NewtonSchulz) -> int:
    s, l, steps, runs = min(m, n), max(m, n), settings.steps, len(settings.runs())
    if form == "standard":
        return steps * (4 * s * s * l + 2 * s**3)
    return 4 * runs * s * s * l + 2 * s**3 * (4 * steps - 3 * runs)


def workspace_bytes(m: int, n: int, settings: NewtonSchulz, device: torch.device | str) -> int:
    """Peak bytes that :func:`orthogonalize` holds beside its input, per matrix, the result included."""
    device = torch.device(device)
    s, l = min(m, n), max(m, n)
    size = compute_dtype(settings, device).itemsize
    small = 4 if choose_form(m, n, settings, device.type) == "gram" else 2
    wide = 2 * s * l
    normalize = 2 * s * l if size > 2 else 3 * s * l  # float16 keeps a float32 copy until the cast
    return size * max(wide + small * s * s, normalize)


def compute_dtype(settings: NewtonSchulz, device: torch.device | str) -> torch.dtype:
    """The dtype the products run in and the result has; "meta" stands for a device that is not known yet.

    Raises ValueError for float16 off CUDA.
    """
    device = torch.device(device)
    if settings.dtype == "auto":
        fast = device.type == "cuda" or (device.type == "cpu" and cpu_has_fast_bf16())
        return torch.bfloat16 if fast else torch.float32
    if settings.dtype == "float16" and device.type not in ("cuda", "meta"):
        raise ValueError(
            "Newton-Schulz dtype float16 is for CUDA (10 to 400 times slower on CPU): use float32, bfloat16 or auto on "
            f"{device.type}"
        )
    return getattr(torch, settings.dtype)


@functools.cache
def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AMX, AVX512-BF16, Arm BF16); elsewhere bf16 is emulated, slowly."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    lines = [line for line in text.splitlines() if line.lower().startswith(("flags", "features"))]
    flags = set(lines[0].split()) if lines else set()
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


def _normalized(x: torch.Tensor, dtype: torch.dtype, eps: float) -> torch.Tensor:
    """A contiguous copy of x in ``dtype``, each matrix divided by max(its Frobenius norm, eps)."""
    first = torch.float32 if dtype == torch.float16 else dtype
    x = x.contiguous().to(first)  # one memory order: strided input gives the same bits
    if x.ndim == 2:
        norm = x.norm()
    else:
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    return (x / norm.clamp(min=eps)).to(dtype)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """a b into ``out``, for matrices or batches."""
    return torch.mm(a, b, out=out) if a.ndim == 2 else torch.bmm(a, b, out=out)


def _add_product(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float, out: torch.Tensor
) -> torch.Tensor:
    """beta c + alpha a b into ``out``, none of the others, in one kernel, for matrices or batches."""
    op = torch.addmm if c.ndim == 2 else torch.baddbmm
    return op(c, a, b, beta=beta, alpha=alpha, out=out)


TORCH_PRODUCTS = Products(_product, _add_product)


def _standard_run(x: torch.Tensor, rows: Coefficients, products: Products) -> torch.Tensor:
    """The steps ``rows`` applied to X [.., S, L]."""
    # Four buffers for all steps: memory that is new in each step costs a CPU up to a fifth of the time.
    gram_SS = x.new_empty(*x.shape[:-1], x.shape[-2])
    poly_SS, spare = torch.empty_like(gram_SS), x.new_empty(x.shape)
    for a, b, c in rows:
        products.product(x, x.mT, gram_SS)
        products.add_product(gram_SS, gram_SS, gram_SS, b, c, poly_SS)
        x, spare = _add_product(x, poly_SS, x, a, 1.0, spare), x
        if not spare.is_contiguous():  # the transposed input: only its memory is of use, and torch's bits are kept
            spare = spare.mT.view(x.shape)
    return x


def _gram_run(x: torch.Tensor, rows: Coefficients, products: Products) -> torch.Tensor:
    """The steps ``rows`` applied to X [.., S, L] through S x S matrices; R, Q and Z commute, being polynomials in R."""
    r_SS = products.product(x, x.mT, x.new_empty(*x.shape[:-1], x.shape[-2]))
    z_SS, q_SS, spare_SS = (torch.empty_like(r_SS) for _ in range(3))
    for step, (a, b, c) in enumerate(rows):
        products.add_product(r_SS, r_SS, r_SS, b, c, z_SS)
        if step == 0:  # (a I + Z) I: no product
            q_SS.copy_(z_SS).diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q_SS, spare_SS = products.add_product(q_SS, z_SS, q_SS, a, 1.0, spare_SS), q_SS
        if step + 1 < len(rows):
            rz_SS = products.add_product(r_SS, r_SS, z_SS, a, 1.0, spare_SS)
            products.add_product(rz_SS, z_SS, rz_SS, a, 1.0, r_SS)
    return q_SS @ x


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _checked_forms(given: Mapping[str, str] | Sequence[tuple[str, str]]) -> FormTable:
    """A table of forms with shapes as "MxN", M <= N. Raises ValueError for anything that is no such table."""
    expected = 'Newton-Schulz form must be a name or a table {"MxN": form}'
    try:
        rows = dict(given)
    except (TypeError, ValueError):
        raise ValueError(f"{expected}, got {given!r}") from None
    table = {}
    for shape, form in rows.items():
        sides = str(shape).split("x")
        if len(sides) != 2 or not all(side.isdecimal() for side in sides) or form not in FORMS:
            raise ValueError(f"{expected} with a form of {', '.join(FORMS)}; got {shape!r}: {form!r}")
        m, n = sorted(map(int, sides))
        table[f"{m}x{n}"] = form
    return tuple(sorted(table.items()))


def _checked_table(given: Sequence) -> Coefficients:
    """A user's table as tuples. Raises ValueError unless it is rows of three numbers that converge."""
    rows = [given] if given and all(_is_number(v) for v in given) else list(given)
    if not rows or any(
        isinstance(row, (str, float, int)) or len(row) != 3 or not all(map(_is_number, row)) for row in rows
    ):
        raise ValueError(
            f"Newton-Schulz coefficients must be one of {', '.join(COEFFICIENTS)} or a list of [a, b, c], got {given!r}"
        )
    table: Coefficients = tuple((float(a), float(b), float(c)) for a, b, c in rows)
    low, high = _range_after(table, MAX_STEPS)
    if low < 0.5 or high > 1.5:
        raise ValueError(
            f"Newton-Schulz coefficients {table} do not converge: after {MAX_STEPS} steps singular values of "
            f"[0.01, 1] land in [{low:.3g}, {high:.3g}], expected inside [0.5, 1.5]; allowed by name: "
            f"{', '.join(COEFFICIENTS)}"
        )
    return table


def _range_after(table: Coefficients, steps: int) -> tuple[float, float]:
    """Where singular values of [0.01, 1] land after ``steps`` steps; (0, inf) once one leaves (0, 2) on the way."""
    values = [0.01 * 101 ** (i / 400) for i in range(401)]  # to 1.01: a little past one, as rounding does
    for a, b, c in (table + table[-1:] * steps)[: max(steps, len(table))]:
        values = [a * v + b * v**3 + c * v**5 for v in values]
        if not all(0 < v < 2 for v in values):
            return 0.0, math.inf
    return min(values), max(values)
