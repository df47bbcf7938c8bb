"""Muon with one owner per matrix, for any FSDP2 model; `torchtitan_dmuon.titan` adapts it to TorchTitan.

Importing this package imports torch alone and changes nothing.
"""

from importlib import metadata as _metadata

from .costs import CostModel
from .matrices import MatrixLayout, OwnedSpec
from .muon import Muon
from .newton_schulz import NewtonSchulz
from .ownership import OwnershipPlan
from .runtime.grad_scaler import GradScaler
from .runtime.optimizer import OwnedOptimizer
from .runtime.owned import OwnedMatrices, own_matrices

__all__ = [
    "CostModel",
    "GradScaler",
    "MatrixLayout",
    "Muon",
    "NewtonSchulz",
    "OwnedMatrices",
    "OwnedOptimizer",
    "OwnedSpec",
    "OwnershipPlan",
    "own_matrices",
]

try:
    __version__ = _metadata.version("torchtitan_dmuon")
except _metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+source"
