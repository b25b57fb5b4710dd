"""What `python -m utils report` prints: forecasts beside records, the speed of a forecast, the machine."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence

from utils import hardware, models, records
from utils.experiments import label
from utils.memory import PHASES, forecast
from utils.setups import TrainingSetup
from utils.tables import table
from utils.units import gib, signed_percent

SPEED_LIMIT_ONE_S = 1e-3
SPEED_LIMIT_MANY_S = 5.0
SPEED_COUNT = 10_000


# ---- forecast against record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One recorded run beside its forecast: allocated bytes, peak of each phase and of the whole step."""

    setup: TrainingSetup
    gpu: str
    torch: str
    measured_phases: dict[str, int]
    forecast_phases: dict[str, int]
    measured_bytes: int
    forecast_bytes: int
    forecast_phase: str

    @property
    def error(self) -> float:
        """Signed error of the peak: forecast over measured, less one."""
        return self.forecast_bytes / self.measured_bytes - 1

    @property
    def measured_phase(self) -> str:
        """The phase that decides."""
        return max(PHASES, key=self.measured_phases.__getitem__)

    @property
    def phase_right(self) -> bool:
        return self.measured_phases[self.forecast_phase] == max(self.measured_phases.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Over all comparisons: median and largest absolute error of the peak, share of deciding phases right."""

    rows: int
    median_error: float
    worst_error: float
    phases_right: float


def compare(rows: Iterable[records.Record]) -> list[Comparison]:
    """Every recorded training step that fitted, beside its forecast; the latest run of each setup and machine."""
    comparisons = []
    for run in records.latest_runs(rows):
        peak = run["peak"]
        if peak.status != "ok":
            continue
        setup = records.setup_of(peak)
        expected = forecast(setup)
        comparisons.append(
            Comparison(
                setup=setup,
                gpu=peak.gpu,
                torch=peak.torch,
                measured_phases={phase: run[f"peak_{phase}"].median for phase in PHASES},
                forecast_phases=dict(expected.phases),
                measured_bytes=peak.median,
                forecast_bytes=expected.peak_bytes,
                forecast_phase=expected.peak_phase,
            )
        )
    return comparisons


def summary(comparisons: Sequence[Comparison]) -> Summary:
    errors = [abs(one.error) for one in comparisons]
    return Summary(
        rows=len(comparisons),
        median_error=statistics.median(errors),
        worst_error=max(errors),
        phases_right=sum(one.phase_right for one in comparisons) / len(comparisons),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """One recorded run that did not fit, and what the forecast says. `capacity_bytes` is None for an unknown GPU."""

    setup: TrainingSetup
    gpu: str
    forecast_bytes: int
    capacity_bytes: int | None

    @property
    def verdict(self) -> str:
        if self.capacity_bytes is None:
            return "unknown GPU"
        return "does not fit" if self.forecast_bytes > self.capacity_bytes else "fits (wrong)"


def out_of_memory(rows: Iterable[records.Record]) -> list[OutOfMemory]:
    """Every recorded training step that did not fit, with what it would take on the device."""
    found = []
    for run in records.latest_runs(rows):
        peak = run["peak"]
        if peak.status == "oom":
            setup, gpu = records.setup_of(peak), hardware.match(peak.gpu)
            found.append(
                OutOfMemory(
                    setup=setup,
                    gpu=peak.gpu,
                    forecast_bytes=forecast(setup).device_bytes,
                    capacity_bytes=gpu.memory_bytes if gpu else None,
                )
            )
    return found


def forecast_report(rows: Iterable[records.Record], style: str = "text") -> str:
    """The tables of `report forecast`. `style` is text, markdown or csv; csv holds bytes and fractions."""
    rows = list(rows)
    comparisons = compare(rows)
    if not comparisons:
        raise records.RecordError("no training step that fitted is recorded here")
    if style == "csv":
        lines = [
            {
                "model": one.setup.model,
                "setup": one.setup.canonical(),
                "gpu": one.gpu,
                "torch": one.torch,
                "measured_bytes": one.measured_bytes,
                "forecast_bytes": one.forecast_bytes,
                "error": f"{one.error:.5f}",
                "measured_phase": one.measured_phase,
                "forecast_phase": one.forecast_phase,
            }
            for one in comparisons
        ]
        return table([list(lines[0]), *(line.values() for line in lines)], style)
    header = ["model", "setup", "measured", "forecast", "error", "phase measured", "phase forecast"]
    lines = [
        [
            *_model_and_rest(one.setup),
            gib(one.measured_bytes),
            gib(one.forecast_bytes),
            signed_percent(one.error),
            one.measured_phase,
            one.forecast_phase + ("" if one.phase_right else " (wrong)"),
        ]
        for one in comparisons
    ]
    total = summary(comparisons)
    machines = ", ".join(dict.fromkeys(f"{one.gpu} (torch {one.torch})" for one in comparisons))
    parts = [
        table([header, *lines], style),
        f"{total.rows} setups on {machines}: absolute error of the peak median {100 * total.median_error:.3f} %, "
        f"worst {100 * total.worst_error:.2f} %; deciding phase right in {100 * total.phases_right:.1f} %",
    ]
    too_large = [
        [*_model_and_rest(one.setup), one.gpu, gib(one.forecast_bytes), one.verdict] for one in out_of_memory(rows)
    ]
    if too_large:
        parts.append(table([["model", "out of memory", "on", "forecast", "forecast says"], *too_large], style))
    return "\n\n".join(parts)


def _model_and_rest(setup: TrainingSetup) -> tuple[str, str]:
    return setup.model, label(setup).removeprefix(setup.model).strip()


# ---- speed


def varied_setups(count: int) -> list[dict]:
    """`count` different setups of all models, as the fields of `TrainingSetup`."""
    choices = itertools.product(
        range(1, 10_000),
        ("eager", "sdpa"),
        ("none", "full"),
        ("bf16", "fp32-autocast"),
        ("adamw", "adamw-single", "adamw-fused", "adamw-8bit", "sgd"),
        (1, 4),
        models.names(),
    )
    names = ("attention", "checkpointing", "precision", "optimizer", "gradient_accumulation", "model")
    return [
        {"seq_len": 512 * size, "micro_batch": size, **dict(zip(names, rest, strict=True))}
        for size, *rest in itertools.islice(choices, count)
    ]


def speed(count: int = SPEED_COUNT) -> tuple[float, float]:
    """Median CPU seconds of one forecast, and of `count` of them, from the fields of a setup to the bytes."""
    clock = time.process_time  # one thread's work; a busy neighbour does not count
    times = []
    begin = clock()
    for fields in varied_setups(count):
        start = clock()
        forecast(TrainingSetup(**fields))
        times.append(clock() - start)
    return statistics.median(times), clock() - begin


def speed_report() -> tuple[str, bool]:
    """The text of `report speed`, and whether both limits were kept."""
    one, many = speed()
    kept = [one < SPEED_LIMIT_ONE_S, many < SPEED_LIMIT_MANY_S]
    rows = [
        ["what", "time", "limit", "kept"],
        ["one forecast (median)", f"{1e3 * one:.3f} ms", f"{1e3 * SPEED_LIMIT_ONE_S:g} ms", "yes" if kept[0] else "no"],
        [
            f"{SPEED_COUNT:,} forecasts, one core",
            f"{many:.2f} s",
            f"{SPEED_LIMIT_MANY_S:g} s",
            "yes" if kept[1] else "no",
        ],
    ]
    return table(rows), all(kept)


# ---- the machine


def environment_report(stamp: dict) -> str:
    """The text of `report environment`, from `measure.environment()`."""
    gpu = f"{stamp['gpu_count']} x {stamp['gpu']}" if stamp["gpu_count"] else "none"
    rows = [["gpu", gpu]]
    rows += [[name, stamp[name]] for name in ("driver", "cuda") if stamp["gpu_count"]]
    rows += [["torch", stamp["torch"]], *stamp["libraries"].items(), ["commit", stamp["commit"]]]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)
