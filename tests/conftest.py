"""What several tests share."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from utils import experiments

WORKERS = Path(__file__).parent / "workers"


@pytest.fixture
def echo(monkeypatch):
    """The stand-in worker and experiment "echo", known to this process and to those it starts."""
    monkeypatch.setenv("PYTHONPATH", str(WORKERS))
    monkeypatch.syspath_prepend(str(WORKERS))
    monkeypatch.setitem(experiments.MODULES, "echo", "echo")
    return importlib.import_module("echo")
