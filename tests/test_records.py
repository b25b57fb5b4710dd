"""Records are read strictly, and written so that nothing is lost."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import pytest

from utils import experiments, records

ROW = {
    "experiment": "echo",
    "setup": '{"behaviour":"ok","log":"","number":1}',
    "metric": "peak",
    "unit": "bytes",
    "median": 1000,
    "p20": 990,
    "p80": 1010,
    "repetitions": 3,
    "gpu": "NVIDIA H200",
    "gpu_count": 1,
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.13.0",
    "libraries": '{"python":"3.11.7"}',
    "commit": "unknown",
    "utc": "2026-01-31T12:00:00.000Z",
    "method_version": 1,
    "status": "ok",
    "reason": "",
}
STEP = {"metric": "step_ms", "unit": "ms", "median": 2.5, "p20": 2.25, "p80": 3.0}
OOM = {"status": "oom", "reason": 'no room, "none"', "median": None, "p20": None, "p80": None, "repetitions": 0}

pytestmark = pytest.mark.usefixtures("echo")


def row(**changes) -> records.Record:
    return records.Record(**{**ROW, **changes})


def run(number: int = 1, **changes) -> list[records.Record]:
    setup = f'{{"behaviour":"ok","log":"","number":{number}}}'
    return [row(setup=setup, **changes), row(setup=setup, **{**STEP, **changes})]


@pytest.fixture
def path(tmp_path):
    """A file with two finished runs, lines 2 to 5, and one that was out of memory, line 6."""
    path = tmp_path / "echo.csv"
    records.append(path, run(1))
    records.append(path, run(2))
    records.append(path, [row(setup='{"behaviour":"oom","log":"","number":3}', **OOM)])
    return path


def damage(path, line: int, old: str, new: str) -> None:
    lines = path.read_text().split("\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    path.write_text("\n".join(lines))


def test_what_is_written_is_read(path):
    expected = [*run(1), *run(2), row(setup='{"behaviour":"oom","log":"","number":3}', **OOM)]
    assert records.read_file(path, "echo") == expected
    assert records.read("echo", path.parent) == expected
    assert path.read_text().split("\n")[0] == ",".join(records.COLUMNS)


def test_whole_numbers_stay_whole_and_others_exact(path):
    peak, step = records.read_file(path)[:2]
    assert type(peak.median) is int and type(step.median) is float
    large = row(
        utc="2026-02-01T00:00:00.000Z", **{**OOM, "median": 2**60 + 1, "p20": 1, "p80": 2**61, "repetitions": 1}
    )
    records.append(path, [large])
    assert records.read_file(path)[-1] == large


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"experiment": "ecco"}, "experiment: 'ecco': allowed: training-step, echo; did you mean echo?"),
        ({"setup": "{"}, "setup: not valid JSON"),
        ({"setup": "[1]"}, "setup: a JSON object is required"),
        ({"setup": '{"number": 1}'}, "setup: not in canonical form (sorted keys, no spaces)"),
        ({"setup": '{"number":1.5}'}, "setup: number: "),
        ({"metric": "pique"}, "metric: 'pique': allowed: peak, step_ms"),
        ({"unit": "GiB"}, "unit: 'GiB': peak is in bytes"),
        ({"median": 1000.5}, "median: 1000.5: a whole number of bytes, zero or more"),
        ({"median": -1}, "median: -1: a whole number of bytes, zero or more"),
        ({"median": 2000}, "median: 2000: between p20 (990) and p80 (1010)"),
        ({"p20": None}, "p20: None: a whole number of bytes, zero or more"),
        ({**STEP, "p80": float("nan")}, "p80: nan: a finite number, zero or more"),
        ({"repetitions": 0}, "repetitions: 0: 1 or more where there is a median"),
        ({"repetitions": "three"}, "repetitions: 'three': a whole number, zero or more"),
        ({"gpu": ""}, "gpu: '': the name of the GPU, or cpu"),
        ({"gpu_count": 0}, "gpu_count: 0: 1 or more"),
        ({"gpu": "cpu"}, "gpu_count: 1: 0 on the CPU"),
        ({"driver": ""}, "driver: '': a version, or unknown"),
        ({"torch": ""}, "torch: '': a version"),
        ({"libraries": "3.11"}, "libraries: '3.11': a JSON object of library and version"),
        ({"commit": "main"}, "commit: 'main': 40 hexadecimal digits"),
        ({"utc": "2026-02-30T12:00:00.000Z"}, "utc: '2026-02-30T12:00:00.000Z': a UTC time such as"),
        ({"status": "good"}, "status: 'good': allowed: ok, oom, failed"),
        ({"reason": "because"}, "reason: 'because': empty when status is ok"),
        ({"status": "oom"}, "reason: '': required when status is oom"),
        ({**OOM, "reason": "two\nlines"}, "reason: 'two\\nlines': one line of text without spaces around it"),
        ({**OOM, "status": "ok", "reason": ""}, "median: None: required when status is ok"),
        ({**OOM, "repetitions": 3}, "repetitions: 3: 0 where there is no median"),
    ],
)
def test_a_record_says_what_is_wrong_with_it(changes, error):
    with pytest.raises(records.RecordError) as caught:
        row(**changes)
    assert error in str(caught.value)
    assert len(caught.value.errors) == 1


@pytest.mark.parametrize(
    ("line", "old", "new", "error"),
    [
        (1, "median", "mean", "not a file of records; the first line must be experiment,setup,"),
        (2, "1000", "1000x", "median: '1000x': a whole number of bytes, zero or more"),
        (3, "2.5", "fast", "median: 'fast': a finite number, zero or more"),
        (3, "2026-01-31T12:00:00.000Z,1", "2026-01-31T12:00:00.000Z,one", "method_version: 'one': a whole number"),
        (4, ",580.1", "", "columns: 18: a row has 19"),
        (4, "echo,", "<<<<<<< HEAD\necho,", "columns: 1: a row has 19"),
        (4, "echo,", "training-step,", "setup: "),
        (5, '"{""behav', '"{"behav', "not a CSV row"),
        (5, "NVIDIA H200", '"NVIDIA H200', "not a CSV row"),
        (6, "no room", "no\x07room", "reason: "),
    ],
)
def test_a_damaged_row_is_named_by_file_and_line(path, line, old, new, error):
    damage(path, line, old, new)
    with pytest.raises(records.RecordError) as caught:
        records.read_file(path, "echo")
    assert caught.value.errors[0].startswith(f"{path}:{line}: {error}")


def test_several_damaged_rows_are_all_named_one_line_each(path):
    damage(path, 2, "1000", "")
    damage(path, 5, ",ok,", ",good,")
    damage(path, 5, "echo", "ecco")
    with pytest.raises(records.RecordError) as caught:
        records.read_file(path, "echo")
    assert [error.split(": ")[0] for error in caught.value.errors] == [f"{path}:2", f"{path}:2", f"{path}:5"]
    assert all("\n" not in error for error in caught.value.errors)


def test_a_row_of_bytes_that_are_not_text_is_named(path):
    path.write_bytes(path.read_bytes().replace(b"no room", b"no \xff room"))
    with pytest.raises(records.RecordError, match=r"echo.csv:6: not a CSV row"):
        records.read_file(path)


def test_a_foreign_row_is_named(path):
    """A valid row of one experiment in the file of another."""
    path = path.rename(path.with_name("training-step.csv"))
    with pytest.raises(records.RecordError) as caught:
        records.read("training-step", path.parent)
    assert f"{path}:2: experiment: 'echo': this file holds 'training-step' only" in caught.value.errors


def test_a_file_full_of_errors_is_cut_short(path):
    path.write_text(path.read_text() + "x\n" * 100)
    with pytest.raises(records.RecordError) as caught:
        records.read_file(path)
    assert len(caught.value.errors) == records.ERRORS_SHOWN_PER_FILE + 1
    assert caught.value.errors[-1] == f"{path}: and 80 more errors"


def test_a_row_twice_is_named(path):
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:-1], lines[3], ""]))
    with pytest.raises(records.RecordError, match=r"echo.csv:7: the same row as line 4"):
        records.read_file(path)


def test_a_run_without_one_of_its_metrics_is_named(path):
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:4], *lines[5:]]))
    with pytest.raises(records.RecordError, match=r"echo.csv:4: metric: no row for step_ms in this run"):
        records.read_file(path)


def test_missing_folder_missing_file_and_unknown_experiment_are_told_apart(tmp_path):
    with pytest.raises(records.RecordError, match="nowhere: no such folder; the records lie in data/"):
        records.read("echo", tmp_path / "nowhere")
    with pytest.raises(records.RecordError, match=r"echo.csv: no such file; `python -m utils measure echo`"):
        records.read("echo", tmp_path)
    with pytest.raises(experiments.ExperimentError, match="did you mean echo"):
        records.read("ehco", tmp_path)
    with pytest.raises(records.RecordError, match="cannot be read: Is a directory"):
        records.read_file(tmp_path)


def test_a_machine_without_records_of_its_own_has_none(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LOCAL", tmp_path / "local")
    assert records.local("echo") == []
    records.append(records.path_of("echo", records.LOCAL), run())
    assert records.local("echo") == run()


# ---- writing


def test_append_keeps_every_byte_that_was_there(path):
    path.write_text(path.read_text().rstrip("\n"))  # an editor took the last newline away
    before = path.read_text()
    records.append(path, run(7))
    assert path.read_text().startswith(before + "\n")
    assert records.read_file(path)[-2:] == run(7)


def test_append_does_not_touch_what_is_no_file_of_records(tmp_path):
    path = tmp_path / "echo.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(records.RecordError, match="nothing was written"):
        records.append(path, run())
    assert path.read_text() == "a,b\n1,2\n"


def test_a_write_that_is_cut_short_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(records.os, "replace", lambda *_: 1 / 0)
        records.append(path, run(7))
    assert path.read_bytes() == before
    records.append(path, run(8))
    assert path.read_bytes().startswith(before)


def test_nothing_but_the_file_and_one_hidden_folder_is_left(path):
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".locks", "echo.csv"]
    assert (path.parent / ".locks" / ".gitignore").read_text() == "*\n"


WRITER = """
import sys, time
from pathlib import Path
from utils import experiments, records
experiments.MODULES["echo"] = "echo"
import filelock
Path(sys.argv[1]).with_name(sys.argv[2]).touch()
while not Path(sys.argv[1]).with_name("go").exists():
    time.sleep(0.001)
row = dict(zip(records.COLUMNS, next(iter(records.read_file(Path(sys.argv[1])))).__dict__.values()))
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 25):
    setup = f'{{"behaviour":"oom","log":"","number":{number}}}'
    nothing = {"median": None, "p20": None, "p80": None, "repetitions": 0}
    row |= {"setup": setup, "status": "oom", "reason": "none", **nothing}
    records.append(Path(sys.argv[1]), [records.Record(**row)])
"""


def test_writers_at_once_lose_no_row_and_readers_never_see_half_a_file(path):
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, str(start)], cwd=records.ROOT) for start in (100, 200, 300)]
    while not all(path.with_name(str(start)).exists() for start in (100, 200, 300)):
        time.sleep(0.01)
    path.with_name("go").touch()
    while any(writer.poll() is None for writer in writers):
        records.read_file(path, "echo")
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    numbers = {records.setup_of(record).number for record in records.read_file(path, "echo")}
    assert numbers == {1, 2, 3, *range(100, 125), *range(200, 225), *range(300, 325)}


# ---- merging and checking


def test_merge_adds_what_is_new_and_skips_what_is_there(path, tmp_path):
    data = tmp_path / "data"
    assert records.merge(path, data) == (data / "echo.csv", 5, 0)
    records.append(path, run(9))
    assert records.merge(path, data) == (data / "echo.csv", 2, 5)
    assert records.merge(path, data) == (data / "echo.csv", 0, 7)
    assert records.read("echo", data) == records.read_file(path)


def test_merge_refuses_rows_from_the_cpu_and_damaged_files(path, tmp_path):
    data = tmp_path / "data"
    cpu = tmp_path / "cpu.csv"
    records.append(cpu, run(gpu="cpu", gpu_count=0, driver="", cuda=""))
    with pytest.raises(records.RecordError, match="rows measured on the CPU"):
        records.merge(cpu, data)
    damage(path, 4, "1000", "x")
    with pytest.raises(records.RecordError, match=r"echo.csv:4: median"):
        records.merge(path, data)
    assert not data.exists()


def test_check_names_the_errors_of_all_files(path):
    damage(path, 2, "1000", "x")
    (path.parent / "training-stop.csv").write_text("")
    (path.parent / "training-step.csv").write_text("")
    with pytest.raises(records.RecordError) as caught:
        records.check(path.parent)
    assert [error.split(": ")[0] for error in caught.value.errors] == [
        f"{path}:2",
        f"{path.parent / 'training-step.csv'}:1",
        f"{path.parent / 'training-stop.csv'}",
    ]


def test_the_records_of_the_book_are_valid():
    for path, rows in records.check().items():
        assert rows, path


# ---- runs


def test_the_latest_run_counts_unless_it_failed():
    old, new = run(utc="2026-01-01T00:00:00.000Z"), run(utc="2026-02-01T00:00:00.000Z")
    new[0] = dataclasses.replace(new[0], median=1001)
    failed = [row(utc="2026-03-01T00:00:00.000Z", **{**OOM, "status": "failed"})]
    other_machine = run(gpu="NVIDIA A100")
    runs = records.latest_runs([*new, *old, *failed, *other_machine])
    assert [[run["peak"].median, run["peak"].gpu] for run in runs] == [[1001, "NVIDIA H200"], [1000, "NVIDIA A100"]]
    assert [list(run) for run in runs] == [["peak", "step_ms"]] * 2
    assert [run["peak"].status for run in records.latest_runs(failed)] == ["failed"]


def test_a_frame_has_one_row_a_setup_and_its_metrics_as_columns(path):
    frame = records.frame("echo", records.read_file(path))
    assert list(frame["number"]) == [1, 2, 3]
    assert list(frame["status"]) == ["ok", "ok", "oom"]
    assert frame["peak"].dtype == "Int64"
    assert list(frame["peak"])[:2] == [1000, 1000] and frame["peak"].isna()[2]
    assert list(frame["step_ms_p20"])[:2] == [2.25, 2.25]
    assert "peak_p20" not in frame
    empty = records.frame("echo", [])
    assert len(empty) == 0 and list(empty.columns) == list(frame.columns)


def test_the_columns_are_documented():
    text = (records.DATA / "README.md").read_text()
    for column in records.COLUMNS:
        assert f"| `{column}` |" in text, column
    for name in experiments.names():
        for metric, unit in experiments.get(name).metrics.items():
            assert f"| `{metric}` | {unit} |" in text, metric


def test_a_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        row().median = 1


def test_merge_says_which_commit_was_measured_where_the_rows_do_not_know(path, tmp_path):
    rows = [*run(1, commit="unknown"), *run(2, commit="a" * 40)]
    source = tmp_path / "copy" / "echo.csv"
    records.append(source, rows)
    written, added, _ = records.merge(source, tmp_path / "data", commit="0" * 40)
    assert added == len(rows)
    assert {(records.setup_of(row).number, row.commit) for row in records.read_file(written)} == {
        (1, "0" * 40),
        (2, "a" * 40),
    }


def test_merge_refuses_what_nobody_can_reproduce(tmp_path):
    source = tmp_path / "copy" / "echo.csv"
    records.append(source, run(1, commit="a" * 40 + "-dirty"))
    with pytest.raises(records.RecordError, match="uncommitted changes"):
        records.merge(source, tmp_path / "data")
    assert not (tmp_path / "data").exists()
