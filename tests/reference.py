"""Slow, obvious versions of the numerics, in float64, one matrix at a time; the fast paths are compared with them."""

from __future__ import annotations

import torch


def newton_schulz(x: torch.Tensor, table, eps: float = 1e-7) -> torch.Tensor:
    """The polynomial on [M, N] in float64, row by row of the table: X <- a X + b (X X^T) X + c (X X^T)^2 X."""
    x = x.double()
    x = x / max(float(x.norm()), eps)
    for a, b, c in table:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def newton_schulz_by_svd(x: torch.Tensor, table, eps: float = 1e-7) -> torch.Tensor:
    """The same through singular values: the polynomial acts on each of them alone."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / max(float(x.double().norm()), eps)
    for a, b, c in table:
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ vh


def muon_step(w, grad, buffer, *, lr, table, weight_decay=0.1, momentum=0.95, nesterov=True, form="ema", factor=1.0,
              cautious=False):  # fmt: skip
    """One Muon step on [M, N] in float64; returns the new weight and the new buffer."""
    w, grad, buffer = w.double(), grad.double(), buffer.double()
    scale = (1 - momentum) if form == "ema" else 1.0
    buffer = momentum * buffer + scale * grad
    mixed = momentum * buffer + scale * grad if nesterov else buffer
    update = newton_schulz(mixed, table)
    decayed = (update * w >= 0).double() if cautious else torch.ones_like(w)
    return w - lr * weight_decay * decayed * w - lr * factor * update, buffer


def normalized_rows(update: torch.Tensor, moment: torch.Tensor, beta: float):
    """NorMuon's second half, row by row, for one [M, N]; returns the update and the new moment, a list of M numbers."""
    moment = [beta * old + (1 - beta) * float((row**2).mean()) for old, row in zip(moment, update)]
    rows = torch.stack([row / (value**0.5 + 1e-8) for row, value in zip(update, moment)])
    return rows * min(update.shape) ** 0.5 / rows.norm(), moment
