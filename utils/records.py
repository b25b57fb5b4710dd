"""Records: measured numbers in CSV files, one file an experiment, one row a metric of a setup.

`data/<experiment>.csv` holds the rows that come with the book, `data/local/<experiment>.csv` those of the
reader's own machine. data/README.md explains the columns. Rows are added, never changed: a run that was made
again has a later `utc`.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import io
import json
import math
import os
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from utils import experiments, models
from utils.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
LOCAL = DATA / "local"
STATUSES = ("ok", "oom", "failed")
ERRORS_SHOWN_PER_FILE = 20


class RecordError(InputError):
    """Damaged, foreign or missing records; each line names file and line where there is one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One row: one metric of one setup, measured on one machine. The fields are the columns, in this order.

    `median`, `p20` and `p80` are whole numbers where the unit is bytes, and None where nothing could be measured.
    Raises `RecordError` when a field does not hold what its column says.
    """

    experiment: str
    setup: str
    metric: str
    unit: str
    median: float | None
    p20: float | None
    p80: float | None
    repetitions: int
    gpu: str
    gpu_count: int
    driver: str
    cuda: str
    torch: str
    libraries: str
    commit: str
    utc: str
    method_version: int
    status: str
    reason: str

    def __post_init__(self):
        errors = _field_errors(self)
        if errors:
            raise RecordError(*errors)

    @property
    def key(self) -> tuple:
        """What makes two measurements the same one: a setup that has this key need not be measured again."""
        return (setup_of(self).canonical(), self.gpu, self.torch, self.method_version)


COLUMNS = tuple(field.name for field in dataclasses.fields(Record))
_WHOLE = ("repetitions", "gpu_count", "method_version")
_VALUES = ("median", "p20", "p80")


def setup_of(record: Record):
    """The record's setup as an object of the experiment's setup type."""
    return _parse_setup(record.experiment, record.setup)


@functools.lru_cache(maxsize=4096)
def _parse_setup(experiment: str, text: str):
    return experiments.get(experiment).setup_type.from_dict(json.loads(text))


# ---- validation


def _field_errors(record: Record) -> list[str]:
    try:
        experiment = experiments.get(record.experiment)
    except experiments.ExperimentError as error:
        return error.errors
    errors = []

    def need(condition: bool, name: str, allowed: str) -> None:
        if not condition:
            errors.append(f"{name}: {getattr(record, name)!r}: {allowed}")

    for name in COLUMNS:
        value = getattr(record, name)
        if isinstance(value, str) and (value != value.strip() or not value.isprintable()):
            need(False, name, "one line of text without spaces around it")
    errors += _setup_errors(record.experiment, record.setup)
    need(record.metric in experiment.metrics, "metric", f"allowed: {', '.join(experiment.metrics)}")
    unit = experiment.metrics.get(record.metric, record.unit)
    need(record.unit == unit, "unit", f"{record.metric} is in {unit}")
    for name in _WHOLE:
        value = getattr(record, name)
        need(type(value) is int and value >= 0, name, "a whole number, zero or more")
    errors += _value_errors(record)
    need(record.gpu != "", "gpu", "the name of the GPU, or cpu")
    if record.gpu == "cpu":
        need(record.gpu_count == 0, "gpu_count", "0 on the CPU")
    else:
        need(record.gpu_count != 0, "gpu_count", "1 or more")
        for name in ("driver", "cuda"):
            need(getattr(record, name) != "", name, "a version, or unknown")
    need(record.torch != "", "torch", "a version")
    need(_is_text_map(record.libraries), "libraries", "a JSON object of library and version")
    need(
        re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", record.commit) is not None,
        "commit",
        "40 hexadecimal digits (-dirty after them if the tree had changes), or unknown",
    )
    need(_is_utc(record.utc), "utc", "a UTC time such as 2026-01-31T12:00:00.000Z")
    need(record.status in STATUSES, "status", f"allowed: {', '.join(STATUSES)}")
    if record.status == "ok":
        need(record.median is not None, "median", "required when status is ok")
        need(record.reason == "", "reason", "empty when status is ok")
    elif record.status in STATUSES:
        need(record.reason != "", "reason", f"required when status is {record.status}")
    return errors


def _value_errors(record: Record) -> list[str]:
    values = [getattr(record, name) for name in _VALUES]
    if values == [None, None, None]:
        return [] if record.repetitions == 0 else [f"repetitions: {record.repetitions!r}: 0 where there is no median"]
    errors = []
    for name, value in zip(_VALUES, values, strict=True):
        if record.unit == "bytes" and (type(value) is not int or value < 0):
            errors.append(f"{name}: {value!r}: a whole number of bytes, zero or more")
        elif type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            errors.append(f"{name}: {value!r}: a finite number, zero or more")
    if not errors and not record.p20 <= record.median <= record.p80:
        errors.append(f"median: {record.median!r}: between p20 ({record.p20!r}) and p80 ({record.p80!r})")
    if record.repetitions == 0:
        errors.append("repetitions: 0: 1 or more where there is a median")
    return errors


@functools.lru_cache(maxsize=4096)
def _setup_errors(experiment: str, text: str) -> list[str]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        return [f"setup: not valid JSON ({error})"]
    if not isinstance(fields, dict):
        return ["setup: a JSON object is required"]
    if canonical_json(fields) != text:
        return ["setup: not in canonical form (sorted keys, no spaces)"]
    try:
        _parse_setup(experiment, text)
    except InputError as error:
        return [f"setup: {line}" for line in error.errors]
    return []


def canonical_json(value) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _is_text_map(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and all(isinstance(version, str) for version in value.values())


def _is_utc(text: str) -> bool:
    try:
        return len(text) == 24 and datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ") is not None
    except ValueError:
        return False


# ---- reading


def path_of(experiment: str, folder: Path = DATA) -> Path:
    return Path(folder) / f"{experiment}.csv"


def read(experiment: str, folder: Path = DATA) -> list[Record]:
    """The records that come with the book.

    Raises `RecordError` if the folder or file is missing, or names every damaged or foreign row; `ExperimentError` for
    an unknown experiment.
    """
    experiments.get(experiment)
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordError(
            f"{shown(folder)}: no such folder; the records lie in data/ beside the package utils: "
            "run from a checkout of the book (pip install -e .)"
        )
    path = path_of(experiment, folder)
    if not path.is_file():
        raise RecordError(f"{shown(path)}: no such file; `python -m utils measure {experiment}` makes records")
    return read_file(path, experiment)


def local(experiment: str) -> list[Record]:
    """The records of this machine; none if nothing was measured yet."""
    experiments.get(experiment)
    path = path_of(experiment, LOCAL)
    return read_file(path, experiment) if path.is_file() else []


def read_file(path: Path, experiment: str | None = None) -> list[Record]:
    """All rows of one file. `experiment`: rows of another one are foreign. Raises `RecordError`."""
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{shown(path)}: cannot be read: {error.strerror}") from None
    if lines[-1] == b"":
        lines.pop()
    if not lines or not _is_header(lines[0]):
        raise RecordError(f"{shown(path)}:1: not a file of records; the first line must be {','.join(COLUMNS)}")
    rows, errors = [], []
    for number, line in enumerate(lines[1:], start=2):
        try:
            record = _from_line(line)
            if experiment is not None and record.experiment != experiment:
                raise RecordError(f"experiment: {record.experiment!r}: this file holds {experiment!r} only")
        except RecordError as error:
            errors += [f"{shown(path)}:{number}: {text}" for text in error.errors]
        else:
            rows.append((number, record))
    errors = errors or [f"{shown(path)}:{number}: {text}" for number, text in _run_errors(rows)]
    if len(errors) > ERRORS_SHOWN_PER_FILE:
        hidden = len(errors) - ERRORS_SHOWN_PER_FILE
        errors = errors[:ERRORS_SHOWN_PER_FILE] + [f"{shown(path)}: and {hidden} more errors"]
    if errors:
        raise RecordError(*errors)
    return [record for _, record in rows]


def _is_header(line: bytes) -> bool:
    return line.decode("utf-8", "replace").rstrip("\r").split(",") == list(COLUMNS)


def _split(line: bytes) -> list[str]:
    # Each line is parsed by itself: no field holds a newline, so an unclosed quote is an error of this line alone.
    try:
        return next(csv.reader([line.decode("utf-8").removesuffix("\r")], strict=True), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise RecordError(f"not a CSV row ({error})") from None


def _from_line(line: bytes) -> Record:
    fields = _split(line)
    if len(fields) != len(COLUMNS):
        raise RecordError(f"columns: {len(fields)}: a row has {len(COLUMNS)}")
    values: dict = dict(zip(COLUMNS, fields, strict=True))
    for name in _WHOLE:
        with contextlib.suppress(ValueError):  # what is not a number is reported by the record itself
            values[name] = int(values[name])
    for name in _VALUES:
        if values[name] == "":
            values[name] = None
            continue
        with contextlib.suppress(ValueError):
            values[name] = int(values[name]) if values["unit"] == "bytes" else float(values[name])
    return Record(**values)


def _run_errors(rows: list[tuple[int, Record]]) -> list[tuple[int, str]]:
    """What only several rows together can show: a row twice, a run without one of its metrics."""
    errors, first_seen, runs = [], {}, {}
    for number, record in rows:
        if record in first_seen:
            errors.append((number, f"the same row as line {first_seen[record]}"))
        first_seen.setdefault(record, number)
        runs.setdefault((record.key, record.utc, record.status), []).append((number, record))
    for run in runs.values():
        number, record = run[0]
        experiment = experiments.get(record.experiment)
        if record.status == "ok" and record.method_version == experiment.method_version:
            missing = set(experiment.metrics) - {row.metric for _, row in run}
            if missing:
                errors.append((number, f"metric: no row for {', '.join(sorted(missing))} in this run"))
    return sorted(errors)


def shown(path: Path) -> str:
    """The path as a reader of the repository knows it."""
    path = Path(path).absolute()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def latest_runs(rows: Iterable[Record]) -> list[dict[str, Record]]:
    """Metric -> record for every setup and machine, the latest run of each, in order of first appearance.

    A failed run counts only where there is no other.
    """
    runs: dict[tuple, dict[str, Record]] = {}
    for record in rows:
        kept = next(iter(runs.get(record.key, {}).values()), None)
        rank = (record.status != "failed", record.utc)
        if kept is None or rank > (kept.status != "failed", kept.utc):
            runs[record.key] = {record.metric: record}
        elif rank == (kept.status != "failed", kept.utc):
            runs[record.key][record.metric] = record
    return list(runs.values())


def frame(experiment: str, rows: Iterable[Record] | None = None):
    """A pandas frame with one row a setup and machine (its latest run): setup fields, machine, metrics as columns.

    A metric in bytes is deterministic and has one column (whole numbers, missing where there is none); another has its
    median and `_p20`, `_p80`. `rows` defaults to the records that come with the book.
    """
    import pandas

    metrics = experiments.get(experiment).metrics
    machine = ("gpu", "gpu_count", "driver", "cuda", "torch", "commit", "utc", "method_version", "status", "reason")
    columns = [field.name for field in dataclasses.fields(experiments.get(experiment).setup_type)] + list(machine)
    for metric, unit in metrics.items():
        columns += [metric] if unit == "bytes" else [metric, f"{metric}_p20", f"{metric}_p80"]
    table = []
    for run in latest_runs(read(experiment) if rows is None else rows):
        record = next(iter(run.values()))
        line = {**setup_of(record).to_dict(), **{name: getattr(record, name) for name in machine}}
        for metric, row in run.items():
            line |= {metric: row.median, f"{metric}_p20": row.p20, f"{metric}_p80": row.p80}
        table.append(line)
    whole = {metric: "Int64" for metric, unit in metrics.items() if unit == "bytes"}
    return pandas.DataFrame(table, columns=columns).astype(whole)


# ---- writing


def lock_folder(folder: Path) -> Path:
    """`folder/.locks`, for lock files and half-written files; made if need be, and ignored by git."""
    hidden = Path(folder) / ".locks"
    hidden.mkdir(parents=True, exist_ok=True)
    ignore = hidden / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    return hidden


def append(path: Path, rows: Iterable[Record]) -> None:
    """Add rows at the end of a file, or start it. All rows are there afterwards, or (if killed) none of them.

    Several processes may append to one file: each waits for its turn, and a reader sees the old file or the new one.
    Raises `RecordError` if the file is not one of records.
    """
    import filelock

    path = Path(path)
    hidden = lock_folder(path.parent)
    with filelock.FileLock(hidden / f"{path.name}.lock"):
        content = path.read_bytes() if path.exists() else ",".join(COLUMNS).encode() + b"\n"
        if not _is_header(content.partition(b"\n")[0]):
            raise RecordError(f"{shown(path)}:1: not a file of records; nothing was written to it")
        if not content.endswith(b"\n"):
            content += b"\n"
        half_written = hidden / f"{path.name}.new"  # one name is enough: the lock is held
        with open(half_written, "wb") as file:
            file.write(content + _to_csv(rows).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(half_written, path)


def _to_csv(rows: Iterable[Record]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for record in rows:
        writer.writerow(["" if value is None else value for value in dataclasses.astuple(record)])
    return text.getvalue()


def merge(file: Path, folder: Path = DATA, commit: str | None = None) -> tuple[Path, int, int]:
    """Add the rows of `file`, measured elsewhere, to the records of their experiment; rows already there are skipped.

    `commit` is written into rows whose own commit is unknown, because they were measured on a copy without git.
    Returns the file written, the rows added and the rows skipped. Raises `RecordError` if a row of either file is
    damaged, was measured on the CPU or with uncommitted changes, or is of a model without a name: then nothing is
    written.
    """
    rows = read_file(file)
    if not rows:
        raise RecordError(f"{shown(file)}: no rows")
    found = sorted({record.experiment for record in rows})
    if len(found) > 1:
        raise RecordError(f"{shown(file)}: rows of several experiments: {', '.join(found)}")
    if any(record.gpu == "cpu" for record in rows):
        raise RecordError(f"{shown(file)}: rows measured on the CPU; data/ holds GPU measurements only")
    if any(record.commit.endswith("-dirty") for record in rows):
        raise RecordError(f"{shown(file)}: rows measured with uncommitted changes; commit them and measure again")
    own = sorted({setup.model for setup in map(setup_of, rows) if hasattr(setup, "model")} - set(models.names()))
    if own:
        # A path means nothing on another machine, and its file may change.
        raise RecordError(
            f"{shown(file)}: rows of {', '.join(own)}; data/ holds models that have a name, see models.py"
        )
    if commit:
        rows = [dataclasses.replace(row, commit=commit) if row.commit == "unknown" else row for row in rows]
    path = path_of(found[0], folder)
    present = set(read_file(path, found[0])) if path.exists() else set()
    new = [record for record in dict.fromkeys(rows) if record not in present]
    if new:
        append(path, new)
    return path, len(new), len(rows) - len(new)


def check(folder: Path = DATA) -> dict[Path, list[Record]]:
    """Read every file of records in a folder. Raises `RecordError` with the errors of all of them."""
    if not Path(folder).is_dir():
        raise RecordError(f"{shown(folder)}: no such folder")
    found, errors = {}, []
    for path in sorted(Path(folder).glob("*.csv")):
        try:
            experiments.get(path.stem)
            found[path] = read_file(path, path.stem)
            errors += [
                f"{shown(path)}:{number}: gpu: 'cpu': data/ holds GPU measurements only"
                for number, record in enumerate(found[path], start=2)
                if record.gpu == "cpu" and folder == DATA
            ]
        except experiments.ExperimentError as error:
            errors += [f"{shown(path)}: {text}" for text in error.errors]
        except RecordError as error:
            errors += error.errors
    if errors:
        raise RecordError(*errors)
    return found
