"""Which of these tests are collected, and the figures that they leave.

The main suite does without these packages, and without these tests where they are missing. `scripts/real_models.sh`
installs them; a case that it cannot run is skipped with its reason.
"""

import importlib.util
import os

import pytest

if importlib.util.find_spec("transformers"):
    os.environ["HF_HUB_OFFLINE"] = "1"
else:
    collect_ignore_glob = ["test_*"]
_figures: list[tuple[str, str]] = []


@pytest.fixture
def figures(request):
    """``figures(line)``: shown with the test's name after the run."""
    return lambda line: _figures.append((request.node.name, line))


def pytest_terminal_summary(terminalreporter):
    for name, line in _figures:
        terminalreporter.write_line(f"{name}: {line}")
