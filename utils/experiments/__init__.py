"""What can be measured: one module an experiment, found by name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

from utils.errors import InputError, did_you_mean

# Name on the command line and in data/ -> module that defines EXPERIMENT.
MODULES = {
    "training-step": "utils.experiments.training_step",
}


class ExperimentError(InputError):
    """An experiment that does not exist."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A list of setups, the worker that measures one of them, and what it reports.

    `method_version` is raised when the worker changes in a way that changes numbers: rows of an older method are kept,
    and measured again. `metrics` maps a metric to its unit; the first is the headline, which every run has a row for,
    also when it failed. `setup_type` is a frozen dataclass with `from_dict`, `to_dict` and `canonical`.
    `refuse` says, one line each, why a setup cannot be measured: what the worker would silently leave out must be here.
    """

    name: str
    worker: str
    method_version: int
    metrics: dict[str, str]
    setup_type: type
    setups: Callable[[], list]
    refuse: Callable[[object], list[str]] = lambda setup: []

    @property
    def headline(self) -> str:
        return next(iter(self.metrics))


def names() -> tuple[str, ...]:
    return tuple(MODULES)


def get(name: str) -> Experiment:
    """The experiment of that name. Raises `ExperimentError` for an unknown one."""
    if name not in MODULES:
        raise ExperimentError(f"experiment: {name!r}: allowed: {', '.join(MODULES)}{did_you_mean(name, MODULES)}")
    return importlib.import_module(MODULES[name]).EXPERIMENT


_SHORT_NAMES = {"seq_len": "seq", "micro_batch": "batch", "gradient_accumulation": "accumulation"}


def label(setup) -> str:
    """A setup in one line: the fields that have no default, then those that differ from it."""
    parts = []
    for field in dataclasses.fields(setup):
        value = getattr(setup, field.name)
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if not required and value == field.default:
            continue
        name = _SHORT_NAMES.get(field.name, field.name)
        if isinstance(value, bool):
            parts.append(name if value else f"no {name}")
        elif isinstance(value, str) and value not in ("full", "none"):
            parts.append(value)
        else:
            parts.append(f"{name} {value}")
    return " ".join(parts)
