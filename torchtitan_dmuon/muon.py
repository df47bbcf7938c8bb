"""The Muon update rule, as an ordinary optimizer over whole 2-D pieces.

Decides: momentum, weight decay, the learning-rate factor of each matrix, and which matrices share a Newton-Schulz
batch. Does not decide what a piece is (`matrices.py`), who owns it, the polynomial (`newton_schulz.py`) or what runs it
(`ns_execution.py`), and never touches torch.distributed. Keeps: one Newton-Schulz run per matrix and step (DESIGN
invariant 2), nothing changed outside ``step()`` (invariant 10), and temporaries bounded by ``batch_bytes``.

Shape suffixes: M rows, N columns of a matrix; B matrices of a batch.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchtitan_dmuon.lr_factors import LR_FACTORS, LrFactor, factor_rule, lr_factor
from torchtitan_dmuon.matrices import WHOLE, MatrixLayout
from torchtitan_dmuon.newton_schulz import NewtonSchulz, compute_dtype, flops, workspace_bytes
from torchtitan_dmuon.ns_execution import TORCH, Execution, orthogonalize

Payload = TypeVar("Payload")

MOMENTUM_FORMS = ("ema", "heavy_ball")
MOMENTUM_DTYPES = ("float32", "bfloat16")
DEFAULT_BATCH_BYTES = 256 * 2**20

# What a user's own factor is called in saved state: a function cannot be stored by value.
_CUSTOM_FACTOR = "custom function"


def set_layout(param: torch.Tensor, layout: MatrixLayout) -> None:
    """Record which matrices a 2-D parameter holds. Raises ValueError unless the layout covers its rows."""
    layout.validate("parameter", param.shape)
    param.matrix_layout = layout  # type: ignore[attr-defined]


def layout_of(param: torch.Tensor) -> MatrixLayout:
    """The layout given to :func:`set_layout`, or one whole matrix."""
    return getattr(param, "matrix_layout", WHOLE)


def muon_flops(
    shapes: Iterable[tuple[Sequence[int], MatrixLayout]], settings: NewtonSchulz, device_type: str = "cpu"
) -> int:
    """Newton-Schulz FLOPs of one step over pieces given as (shape [M, N], layout)."""
    return sum(flops(m, n, settings, device_type) for shape, layout in shapes for m, n in layout.shapes(shape))


# Read when an update is applied, not when it is made.
_OF_THE_STEP = ("params", "param_names", "lr", "weight_decay", "adjust_lr_fn", "cautious_weight_decay", "row_beta")


@dataclass(frozen=True)
class Prepared:
    """Updates [M, N] of a parameter's matrices made ahead of a step, and the options and momentum they are of."""

    updates: list[torch.Tensor]
    options: dict[str, Any]
    momentum: torch.Tensor | None
    version: int  # of the momentum's values

    def serves(self, group: dict[str, Any], momentum: torch.Tensor | None) -> bool:
        """Whether a step with this group and momentum would make the same."""
        unchanged = momentum is self.momentum and (momentum is None or momentum._version == self.version)
        return unchanged and _options_of_the_update(group) == self.options


def _options_of_the_update(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OF_THE_STEP}


@dataclass
class StepStats:
    """What one step ran: matrices orthogonalized, and the FLOPs of doing so."""

    ns_calls: int = 0
    ns_flops: int = 0


class Muon(torch.optim.Optimizer):
    """Muon over whole 2-D float32 (or, for references, float64) parameters; defaults equal torch.optim.Muon's.

    A parameter that holds several matrices carries a layout (:func:`set_layout`). Parameters without a gradient are
    skipped. Per group: ``lr`` (float or one-element tensor), ``weight_decay`` (decoupled, with the group's lr),
    ``cautious_weight_decay`` (arXiv 2510.12402: only where update and weight have the same sign), ``momentum``,
    ``nesterov``, ``momentum_form`` ("ema": torch's; "heavy_ball": Moonlight's, whose buffer is 1 / (1 - momentum)
    larger), ``momentum_dtype`` ("float32" or "bfloat16"), ``adjust_lr_fn`` (a name of :data:`LR_FACTORS`, None for
    "original", or a function as in :func:`lr_factor`), ``ns_steps``, ``ns_coefficients``, ``ns_form``, ``ns_dtype``,
    ``eps`` as in :class:`NewtonSchulz`, and ``ns_kernels``, ``ns_compile`` as in :class:`Execution`. ``row_beta``:
    NorMuon (arXiv 2510.05491) with this decay of the rows' second moment (the paper's is 0.95); None is plain Muon.

    For all groups, ``batch_bytes``: matrices of equal shape and equal Newton-Schulz settings run as one batch whose
    temporaries fit in it, and at least one matrix runs at a time; 0 runs each alone, which makes the result
    independent of which other matrices are here.

    State per parameter [M, N]: ``momentum_buffer`` [M, N]; with NorMuon also ``row_second_moment`` [M, 1], or [1, M] of
    one that is stored transposed. ``stats`` counts the last step. Raises ValueError at construction, naming what is
    allowed.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = "keller",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | LrFactor | None = None,
        *,
        ns_form: Any = "auto",
        ns_dtype: str = "auto",
        ns_kernels: str = "torch",
        ns_compile: bool = False,
        momentum_form: str = "ema",
        momentum_dtype: str = "float32",
        cautious_weight_decay: bool = False,
        row_beta: float | None = None,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
    ) -> None:
        if isinstance(batch_bytes, bool) or not isinstance(batch_bytes, int) or batch_bytes < 0:
            raise ValueError(f"batch_bytes must be an integer >= 0, got {batch_bytes!r}")
        self.batch_bytes = batch_bytes
        self.stats = StepStats()
        self.prepared: Mapping[torch.Tensor, Prepared] = {}  # of `prepare`, for the next step
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_form": ns_form,
            "ns_dtype": ns_dtype,
            "ns_kernels": ns_kernels,
            "ns_compile": ns_compile,
            "momentum_form": momentum_form,
            "momentum_dtype": momentum_dtype,
            "cautious_weight_decay": cautious_weight_decay,
            "row_beta": row_beta,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.stats = StepStats()
        prepared, self.prepared = self.prepared, {}
        ready: list[tuple[_BatchKey, _Block, torch.Tensor]] = []
        missing: list[tuple[_BatchKey, _Block]] = []
        for group in self.param_groups:
            lr = float(group["lr"])  # a tensor rate is read once; on CUDA that waits for it
            for name, param in zip(_names_of(group), group["params"]):
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise ValueError(f"{name}: Muon needs dense gradients, got a sparse one of {tuple(param.shape)}")
                ahead = prepared.get(param)
                if ahead is not None and not ahead.serves(group, self.state[param].get("momentum_buffer")):
                    ahead = None
                buffer = self._momentum(param, group)
                _mix_into_(buffer, param.grad, group)
                blocks = _blocks(group, lr, param, param.grad, buffer, self._row_moment(param, group))
                if ahead is not None:
                    ready += [(*block, update_MN) for block, update_MN in zip(blocks, ahead.updates, strict=True)]
                else:
                    missing += blocks
        for key, block, update_MN in itertools.chain(
            ready, _orthogonalized(missing, _Block.update_input, self.batch_bytes)
        ):
            block.apply(update_MN)
            self.stats.ns_calls += 1
            self.stats.ns_flops += flops(*key.shape_MN, key.settings, key.device.type)
        return loss

    @torch.no_grad()
    def prepare(self, grads: Mapping[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, Prepared]:
        """Orthogonalized updates [M, N] of each matrix of these parameters, as a step with these gradients makes them.

        Changes nothing. Put into ``prepared``, they serve the next step, and that one only, where options and momentum
        are still those; a parameter whose gradient has changed since must not be among them. They take one element of
        the Newton-Schulz dtype for each of the parameters', and while they are made as much again in the momentum's.
        """
        prepared: dict[torch.Tensor, Prepared] = {}
        blocks: list[tuple[_BatchKey, tuple[torch.Tensor, int, _Block]]] = []
        for group in self.param_groups:
            options = copy.deepcopy(_options_of_the_update(group))  # what others change meanwhile is not seen
            for param in (p for p in group["params"] if p in grads):
                momentum = self.state.get(param, {}).get("momentum_buffer")
                version = 0 if momentum is None else momentum._version
                if momentum is None:
                    buffer = torch.zeros_like(param, dtype=_momentum_dtype(param, options))
                else:
                    buffer = momentum.clone()
                _mix_into_(buffer, grads[param], options)
                mine = _blocks(options, 0.0, param, grads[param], buffer, None)
                blocks += [(key, (param, index, block)) for index, (key, block) in enumerate(mine)]
                prepared[param] = Prepared([buffer] * len(mine), options, momentum, version)  # buffers replaced below
        made = _orthogonalized(blocks, lambda payload: payload[2].update_input(), self.batch_bytes)
        for _, (param, index, _), update_MN in made:
            prepared[param].updates[index] = update_MN
        return prepared

    def fresh_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state that a parameter without any would begin its first step with. Changes nothing."""
        self._momentum(param, group)
        self._row_moment(param, group)
        return self.state.pop(param)

    def _momentum(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param, dtype=_momentum_dtype(param, group))
        return state["momentum_buffer"]

    def _row_moment(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor | None:
        state = self.state[param]
        if group["row_beta"] is None:
            state.pop("row_second_moment", None)  # loaded from a NorMuon run; stale from here on
        elif "row_second_moment" not in state:
            shape = (1, param.shape[1]) if layout_of(param).transposed else (param.shape[0], 1)
            state["row_second_moment"] = torch.zeros(shape, dtype=param.dtype, device=param.device)
        return state.get("row_second_moment")

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for group in state["param_groups"]:
            if callable(group["adjust_lr_fn"]):
                group["adjust_lr_fn"] = _CUSTOM_FACTOR
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load hyperparameters and momentum, converting the momentum to this optimizer's dtype.

        State without a recorded momentum convention is torch.optim.Muon's ("ema"); keys that it lacks keep their
        values here. Raises ValueError when the conventions differ: the buffers differ by 1 / (1 - momentum).
        """
        groups = []
        for index, (saved, own) in enumerate(zip(state_dict["param_groups"], self.param_groups)):
            form = saved.get("momentum_form", "ema")
            if form != own["momentum_form"]:
                raise ValueError(
                    f"parameter group {index}: the saved momentum is of the form {form!r}, this optimizer uses "
                    f"{own['momentum_form']!r}, and their buffers differ by a factor 1 / (1 - momentum); set "
                    f"momentum_form = {form!r}, or start without the saved momentum"
                )
            merged = {k: v for k, v in own.items() if k not in ("params", "param_names")} | saved
            for option in ("momentum_dtype", "ns_form", "ns_kernels", "ns_compile"):  # of this run and its machine
                merged[option] = own[option]
            if callable(own["adjust_lr_fn"]):
                merged["adjust_lr_fn"] = own["adjust_lr_fn"]
            elif merged["adjust_lr_fn"] == _CUSTOM_FACTOR:
                raise ValueError(
                    f"parameter group {index}: the saved run used its own adjust_lr_fn, which is not stored; pass the "
                    f"function, or change adjust_lr_fn in the saved group to one of {', '.join(LR_FACTORS)}"
                )
            groups.append(merged)
        groups += state_dict["param_groups"][len(groups) :]  # a wrong count is torch's error to report
        super().load_state_dict({**state_dict, "param_groups": groups})
        for group in self.param_groups:
            _check_group(group)
            for param in group["params"]:
                if "momentum_buffer" in self.state.get(param, {}):
                    state = self.state[param]
                    state["momentum_buffer"] = state["momentum_buffer"].to(_momentum_dtype(param, group))


def settings_of(group: dict[str, Any]) -> NewtonSchulz:
    """The Newton-Schulz settings of a parameter group."""
    return NewtonSchulz(
        steps=group["ns_steps"],
        coefficients=group["ns_coefficients"],
        form=group["ns_form"],
        dtype=group["ns_dtype"],
        eps=group["eps"],
    )


def execution_of(group: dict[str, Any]) -> Execution:
    """What runs the Newton-Schulz of a parameter group."""
    return Execution(kernels=group["ns_kernels"], compile=group["ns_compile"])


def orthogonalized_updates(
    inputs: Sequence[torch.Tensor],
    layouts: Sequence[MatrixLayout],
    settings: NewtonSchulz,
    adjust_lr_fn: str | LrFactor | None = None,
    batch_bytes: int = DEFAULT_BATCH_BYTES,
    row_moments: Sequence[torch.Tensor | None] | None = None,
    row_beta: float | None = None,
    execution: Execution = TORCH,
) -> list[torch.Tensor]:
    """Full update inputs [M, N] -> full updates [M, N], each matrix times its learning-rate factor, in float32.

    For optimizers that keep momentum elsewhere: ``inputs`` are what :func:`momentum_update` returns, whole. The caller
    subtracts lr times the result. Inputs are not modified. NorMuon's ``row_moments`` [M, 1] advance in place.
    """
    moments = row_moments or [None] * len(inputs)
    outputs = [torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs]
    blocks: list[tuple[_BatchKey, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]] = []
    for x, out, layout, moment in zip(inputs, outputs, layouts, moments, strict=True):
        shapes = layout.shapes(x.shape)
        row_views = [None] * len(shapes) if moment is None else layout.views(moment)
        for shape_MN, views in zip(shapes, zip(layout.views(x), layout.views(out), row_views)):
            blocks.append((_BatchKey(shape_MN, settings, execution, x.device, x.dtype), views))
    for key, (_, out_block, moment), update_MN in _orthogonalized(blocks, lambda views: views[0], batch_bytes):
        update = update_MN.reshape(out_block.shape)
        if moment is not None and row_beta is not None:
            update = _normalize_rows(update, moment, row_beta, min(key.shape_MN))
        out_block.copy_(update).mul_(lr_factor(adjust_lr_fn, *key.shape_MN))
    return outputs


def decay_weight(param: torch.Tensor, update: torch.Tensor, decay: float, cautious: bool) -> None:
    """Shrink a weight (any shape, shards included) by ``decay`` in place; with ``cautious`` (arXiv 2510.12402) only
    where it has the sign of its update."""
    if cautious:
        aligned = (update * param).ge_(0)
        param.addcmul_(param, aligned.to(param.dtype), value=-decay)
    else:
        param.mul_(1 - decay)


def momentum_update(
    buffer: torch.Tensor, grad: torch.Tensor, momentum: float, nesterov: bool = True, momentum_form: str = "ema"
) -> torch.Tensor:
    """Advance ``buffer`` in place by ``grad`` (any equal shapes, shards included) and return the update's input."""
    group = {"momentum": momentum, "nesterov": nesterov, "momentum_form": momentum_form}
    _mix_into_(buffer, grad, group)
    return _mixed(buffer, grad, group)


@dataclass(frozen=True)
class _BatchKey:
    """Matrices with equal keys may share a batch, whatever their rates."""

    shape_MN: tuple[int, int]
    settings: NewtonSchulz
    execution: Execution
    device: torch.device
    dtype: torch.dtype

    def batch_size(self, batch_bytes: int) -> int:
        m, n = self.shape_MN
        # The stacked inputs, one more input while it is made, and what orthogonalize holds.
        each = 2 * m * n * self.dtype.itemsize + workspace_bytes(m, n, self.settings, self.device)
        return max(1, batch_bytes // each)


@dataclass(frozen=True)
class _Block:
    """Views of one matrix in a parameter, gradient and momentum: [M, N], or [groups, rows, N] of a fused one."""

    group: dict[str, Any]
    lr: float
    param: torch.Tensor
    grad: torch.Tensor
    buffer: torch.Tensor
    row_moment: torch.Tensor | None = None  # [M, 1], or [groups, rows, 1]

    def update_input(self) -> torch.Tensor:
        return _mixed(self.buffer, self.grad, self.group)

    def apply(self, update_MN: torch.Tensor) -> None:
        decay = self.lr * self.group["weight_decay"]
        factor = lr_factor(self.group["adjust_lr_fn"], *update_MN.shape)
        update = update_MN.reshape(self.param.shape)
        if self.row_moment is not None:
            update = _normalize_rows(update, self.row_moment, self.group["row_beta"], min(update_MN.shape))
        decay_weight(self.param, update, decay, self.group["cautious_weight_decay"])
        self.param.add_(update, alpha=-(self.lr * factor))


def _blocks(
    group: dict[str, Any],
    lr: float,
    param: torch.Tensor,
    grad: torch.Tensor,
    buffer: torch.Tensor,
    row_moment: torch.Tensor | None,
) -> list[tuple[_BatchKey, _Block]]:
    """The matrices of one parameter, in the order of its layout."""
    layout, settings, execution = layout_of(param), settings_of(group), execution_of(group)
    views = (layout.views(t) for t in (param, grad, buffer, row_moment) if t is not None)
    return [
        (_BatchKey(shape_MN, settings, execution, param.device, grad.dtype), _Block(group, lr, *parts))
        for shape_MN, parts in zip(layout.shapes(param.shape), zip(*views))
    ]


def _orthogonalized(
    blocks: Sequence[tuple[_BatchKey, Payload]], input_of: Callable[[Payload], torch.Tensor], batch_bytes: int
) -> Iterator[tuple[_BatchKey, Payload, torch.Tensor]]:
    """Yield (key, payload, update [M, N]) for every block, batch by batch, in the order the keys first appear.

    Inputs are made when their batch runs, so that no more than one batch of them exists.
    """
    by_key: dict[_BatchKey, list[Payload]] = {}
    for key, payload in blocks:
        by_key.setdefault(key, []).append(payload)
    for key, payloads in by_key.items():
        size = key.batch_size(batch_bytes)
        for start in range(0, len(payloads), size):
            batch = payloads[start : start + size]
            if len(batch) == 1:
                stack_BMN = input_of(batch[0]).reshape(1, *key.shape_MN)
            else:
                stack_BMN = torch.empty(len(batch), *key.shape_MN, dtype=key.dtype, device=key.device)
                for slot_MN, payload in zip(stack_BMN, batch):
                    mixed = input_of(payload)
                    slot_MN.view(mixed.shape).copy_(mixed)
                    del mixed
            yield from zip([key] * len(batch), batch, orthogonalize(stack_BMN, key.settings, key.execution))


def _mix_into_(buffer: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
    """Momentum: EMA as in torch.optim.Muon, or heavy ball; computed in the gradient's dtype, stored in the buffer's."""
    momentum = group["momentum"]
    work = buffer.to(grad.dtype)
    if group["momentum_form"] == "ema":
        work.lerp_(grad, 1 - momentum)
    else:
        work.mul_(momentum).add_(grad)
    if work is not buffer:
        buffer.copy_(work)


def _mixed(buffer: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """The update's input: the momentum, or with Nesterov the gradient mixed in once more."""
    buffer = buffer.to(grad.dtype)
    if not group["nesterov"]:
        return buffer
    if group["momentum_form"] == "ema":
        return grad.lerp(buffer, group["momentum"])
    return grad.add(buffer, alpha=group["momentum"])


def _normalize_rows(update: torch.Tensor, moment: torch.Tensor, beta: float, rank: int) -> torch.Tensor:
    """NorMuon: each row divided by the root of its running mean square, the whole then brought to norm sqrt(rank).

    That is the norm of an orthogonal matrix, so the learning-rate factors keep their meaning; with "match_rms_adamw"
    the step is the paper's 0.2 lr sqrt(m n) O / |O|. ``moment`` advances in place.
    """
    update = update.to(moment.dtype)
    moment.lerp_(update.square().mean(dim=-1, keepdim=True), 1 - beta)
    update = update / (moment.sqrt() + 1e-8)
    return update.mul_(math.sqrt(rank) / update.norm().clamp(min=1e-30))


def _names_of(group: dict[str, Any]) -> Sequence[str]:
    return group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]


def _momentum_dtype(param: torch.Tensor, group: dict[str, Any]) -> torch.dtype:
    return param.dtype if group["momentum_dtype"] == "float32" else torch.bfloat16


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError for anything a step would stumble over, and store the settings in one form."""
    settings, execution = settings_of(group), execution_of(group)
    group["ns_coefficients"], group["ns_form"] = settings.coefficients, settings.form
    for key, limit in (("lr", math.inf), ("weight_decay", math.inf), ("momentum", 1.0)):
        value = group[key]
        if key == "lr" and isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < limit:
            raise ValueError(f"{key} must be a number in [0, {limit}), got {group[key]!r}")
    beta = group["row_beta"]
    if beta is not None and (isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta < 1):
        raise ValueError(f"row_beta must be None or a number in [0, 1), got {beta!r}")
    for key in ("nesterov", "cautious_weight_decay"):
        if not isinstance(group[key], bool):
            raise ValueError(f"{key} must be true or false, got {group[key]!r}")
    for key, allowed in (("momentum_form", MOMENTUM_FORMS), ("momentum_dtype", MOMENTUM_DTYPES)):
        if group[key] not in allowed:
            raise ValueError(f"{key} must be one of {', '.join(allowed)}, got {group[key]!r}")
    factor_rule(group["adjust_lr_fn"])
    for name, param in zip(_names_of(group), group["params"]):
        if param.ndim != 2 or 0 in param.shape:
            raise ValueError(f"{name}: Muon updates non-empty 2-D parameters, got shape {tuple(param.shape)}")
        if param.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name}: Muon keeps master weights in float32, got {param.dtype}")
        compute_dtype(settings, param.device)
        execution.check(param.device)
        layout = layout_of(param)
        layout.validate(name, param.shape)
        for m, n in set(layout.shapes(param.shape)):
            lr_factor(group["adjust_lr_fn"], m, n)
