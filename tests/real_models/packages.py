"""What the cases need beside transformers, and why one cannot run."""

import importlib.util
import sys

import pytest

OLDEST_PYTHON = {"lerobot": (3, 12)}


def missing(package: str) -> str:
    """Why ``package`` is not here; empty where it is."""
    if importlib.util.find_spec(package) is not None:
        return ""
    needs = OLDEST_PYTHON.get(package, (3, 0))
    if sys.version_info < needs:
        return f"{package} needs Python {needs[0]}.{needs[1]}, this is {sys.version.split()[0]}"
    return f"{package} is not installed"


def needs(package: str) -> pytest.MarkDecorator:
    reason = missing(package)
    return pytest.mark.skipif(bool(reason), reason=reason)
