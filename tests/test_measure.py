"""`measure` records every end of a setup, goes on after any, and may be killed, resumed and run twice."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import time

import pytest

from utils import launch, measure, records

STAMP = {
    "gpu": "cpu",
    "gpu_count": 0,
    "driver": "",
    "cuda": "",
    "torch": "2.13.0",
    "libraries": {"python": "3.11.7"},
    "commit": "unknown",
}


@pytest.fixture
def probe(monkeypatch):
    """The stamp without a process that imports torch."""
    monkeypatch.setattr(measure, "_probe", lambda device: STAMP)


def run(echo, folder, *behaviours: str, log="", **options) -> str:
    """Measure one setup a behaviour; returns what was shown."""
    setups = [
        echo.EchoSetup(number=number, behaviour=behaviour, log=str(log))
        for number, behaviour in enumerate(behaviours, start=1)
    ]
    stream = io.StringIO()
    options = {"timeout_s": 30, "device": "cpu", "stream": stream, **options}
    measure.run(echo.EXPERIMENT, setups, folder=folder, **options)
    return stream.getvalue()


def read(folder) -> dict[int, list[records.Record]]:
    runs = {}
    for record in records.read("echo", folder):
        runs.setdefault(records.setup_of(record).number, []).append(record)
    return runs


def starts(log) -> list[str]:
    return [line for line in log.read_text().split("\n") if line.startswith("start")]


# ---- numbers


def test_metric_gives_the_median_and_its_spread():
    assert measure.metric([5.0, 1.0, 2.0, 3.0, 4.0, 6.0], "ms") == {
        "unit": "ms",
        "median": 3.5,
        "p20": 2.0,
        "p80": 5.0,
        "repetitions": 6,
    }
    assert measure.metric([7], "bytes") == {"unit": "bytes", "median": 7, "p20": 7, "p80": 7, "repetitions": 1}
    even = measure.metric([10, 13], "bytes")
    assert all(type(even[name]) is int for name in ("median", "p20", "p80"))
    assert even["p20"] <= even["median"] <= even["p80"]


def test_environment_describes_this_machine():
    import torch

    stamp = measure.environment("cpu")
    assert set(stamp) == set(STAMP)
    assert stamp["gpu"] == "cpu" and stamp["torch"] == torch.__version__
    assert re.fullmatch(r"3\.\d+\.\d+\S*", stamp["libraries"]["python"])
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", stamp["commit"])


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA GPU")
def test_environment_describes_the_gpu():
    stamp = measure.environment()
    assert stamp["gpu"] != "cpu" and stamp["gpu_count"] >= 1
    assert re.fullmatch(r"\d+\.[\d.]+", stamp["driver"]) and re.fullmatch(r"\d+\.\d+", stamp["cuda"])


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository of the book's shape, with one commit; calls git in it."""

    def git(*arguments):
        name = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)

    monkeypatch.setattr(records, "ROOT", tmp_path.resolve())
    (tmp_path / "data").mkdir()
    for file in ("code.py", "data/rows.csv"):
        (tmp_path / file).write_text("1\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    return git


def test_commit_says_when_the_code_had_changes(repository, tmp_path):
    head = repository("rev-parse", "HEAD").stdout.strip()
    (tmp_path / "new.py").write_text("not tracked\n")
    (tmp_path / "data" / "rows.csv").write_text("rows are written while measuring\n")
    assert measure.commit() == head
    (tmp_path / "code.py").write_text("2\n")
    assert measure.commit() == f"{head}-dirty"


def test_commit_is_unknown_without_git_or_in_another_repository(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path / "data")
    assert measure.commit() == "unknown"
    monkeypatch.setenv("PATH", "")
    assert measure.commit() == "unknown"


# ---- runs


@pytest.mark.usefixtures("probe")
def test_every_end_is_a_row_and_the_run_goes_on(echo, tmp_path):
    shown = run(echo, tmp_path, "ok", "oom", "oom-uncaught", "fail", "die", "nonsense", "part", "ok")
    runs = read(tmp_path)
    ends = {number: (rows[0].status, rows[0].median, rows[0].reason) for number, rows in runs.items()}
    assert ends[1] == ("ok", 1001, "") and ends[8] == ("ok", 1008, "")
    assert ends[2] == ("oom", 2.5, "tried to allocate 2.00 GiB in the backward pass")
    assert ends[3] == ("oom", None, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert ends[4] == ("failed", None, "exit code 1 without a result: ValueError: the head does not fit the hat")
    assert ends[5][0] == "failed" and "SIGKILL" in ends[5][2]
    assert ends[6][0] == "failed" and "median: 'many': a whole number of bytes" in ends[6][2]
    assert ends[7][0] == "failed" and "no step_ms" in ends[7][2]
    assert [record.metric for record in runs[1]] == ["peak", "step_ms"]
    assert [(record.metric, record.median) for record in runs[2]] == [("step_ms", 2.5), ("peak", None)]
    assert "[1/8] number 1 … peak 0.0 GiB  2 ms  (about " in shown
    assert "[2/8] number 2 oom … out of memory: tried to allocate" in shown
    assert "[4/8] number 4 fail … failed: exit code 1 without a result: ValueError" in shown
    assert "[8/8] number 8 … peak 0.0 GiB  2 ms\n" in shown


@pytest.mark.usefixtures("probe")
def test_a_hanging_setup_is_a_failed_row(echo, tmp_path):
    run(echo, tmp_path, "hang", "ok", timeout_s=1)
    assert [rows[0].status for rows in read(tmp_path).values()] == ["failed", "ok"]


@pytest.mark.usefixtures("probe")
def test_what_has_a_result_is_skipped_and_what_failed_is_tried_again(echo, tmp_path, monkeypatch):
    folder, log = tmp_path / "out", tmp_path / "log"
    run(echo, folder, "ok", "oom", "fail", log=log)
    assert starts(log) == ["start 1", "start 2", "start 3"]
    assert "1 of 3 setups to measure" in run(echo, folder, "ok", "oom", "fail", log=log)
    assert starts(log)[3:] == ["start 3"]
    monkeypatch.setitem(STAMP, "torch", "2.14.0")
    run(echo, folder, "ok", log=log)
    assert starts(log)[4:] == ["start 1"]
    run(echo, folder, "ok", log=log)
    assert len(starts(log)) == 5
    run(echo, folder, "ok", log=log, again=True)
    assert starts(log)[5:] == ["start 1"]


@pytest.mark.usefixtures("probe")
def test_jobs_run_side_by_side(echo, tmp_path):
    start = time.monotonic()
    run(echo, tmp_path, *["slow"] * 6, jobs=6)
    assert time.monotonic() - start < 6 * 0.5
    assert sorted(read(tmp_path)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("probe")
def test_a_damaged_file_is_named_before_anything_is_measured(echo, tmp_path):
    folder, log = tmp_path / "out", tmp_path / "log"
    run(echo, folder, "ok", log=log)
    path = records.path_of("echo", folder)
    path.write_text(path.read_text() + "<<<<<<< HEAD\n")
    with pytest.raises(records.RecordError, match=r"echo.csv:4: columns: 1"):
        run(echo, folder, "ok", "ok", log=log)
    assert starts(log) == ["start 1"]


def test_no_row_from_the_cpu_goes_to_data(echo):
    with pytest.raises(measure.MeasureError, match="--device: 'cpu': data/ holds GPU measurements only"):
        run(echo, records.DATA, "ok")


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="needs a machine without a CUDA GPU")
def test_without_a_gpu_the_error_says_what_to_do(echo, tmp_path):
    with pytest.raises(measure.MeasureError, match=r"^device: 'cuda': torch \S+ .*; --device cpu counts"):
        run(echo, tmp_path, "ok", device="cuda")
    assert list(tmp_path.iterdir()) == []


# ---- killed, interrupted, twice at once

MEASURE = f"""
import sys
from pathlib import Path
from utils import experiments, measure
experiments.MODULES["echo"] = "echo"
import echo
measure._probe = lambda device: {STAMP!r}
folder, log, *behaviours = sys.argv[1:]
setups = [echo.EchoSetup(number=n, behaviour=b, log=log) for n, b in enumerate(behaviours, start=1)]
try:
    measure.run(echo.EXPERIMENT, setups, folder=Path(folder), device="cpu", jobs=1 + ("hang" in behaviours))
except KeyboardInterrupt:
    sys.exit(130)
"""


def start(folder, log, *behaviours: str) -> subprocess.Popen:
    command = [sys.executable, "-c", MEASURE, str(folder), str(log), *behaviours]
    return subprocess.Popen(command, cwd=records.ROOT, stderr=subprocess.DEVNULL)


def wait_for(condition, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_run_that_is_stopped_loses_nothing_leaves_no_worker_and_resumes(echo, tmp_path, number, monkeypatch):
    folder, log = tmp_path / "out", tmp_path / "log"
    behaviours = ["ok", "oom", "ok", "hang", "hang", "ok"]
    process = start(folder, log, *behaviours)
    wait_for(lambda: log.exists() and "beat 4" in log.read_text() and "beat 5" in log.read_text())
    process.send_signal(number)
    begin = time.monotonic()
    assert process.wait(timeout=10) == (130 if number == signal.SIGINT else -number)
    assert time.monotonic() - begin < 3
    wait_for(lambda: (before := log.read_text(), time.sleep(0.4)) and log.read_text() == before, seconds=3)
    assert {n: rows[0].status for n, rows in read(folder).items()} == {1: "ok", 2: "oom", 3: "ok"}
    # The same list again, with the hanging ones replaced by ones that end.
    monkeypatch.setattr(measure, "_probe", lambda device: STAMP)
    monkeypatch.setattr(launch, "run_worker", _without_hanging(launch.run_worker))
    run(echo, folder, *behaviours, log=log)
    assert sorted(read(folder)) == [1, 2, 3, 4, 5, 6]
    assert [starts(log).count(f"start {n}") for n in (1, 2, 3)] == [1, 1, 1]


def _without_hanging(run_worker):
    def replaced(module, payload, **options):
        if payload["setup"]["behaviour"] == "hang":
            payload = {**payload, "setup": {**payload["setup"], "behaviour": "ok"}}
        return run_worker(module, payload, **options)

    return replaced


def test_two_runs_at_once_share_the_setups_and_one_file(echo, tmp_path):
    folder, log = tmp_path / "out", tmp_path / "log"
    behaviours = ["slow"] * 6
    both = [start(folder, log, *behaviours) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert sorted(starts(log)) == [f"start {n}" for n in range(1, 7)]
    assert {n: len(rows) for n, rows in read(folder).items()} == dict.fromkeys(range(1, 7), 2)


def test_a_setup_whose_run_was_killed_is_taken_over_by_the_other(echo, tmp_path):
    folder, log = tmp_path / "out", tmp_path / "log"
    first = start(folder, log, "hang")
    wait_for(lambda: log.exists() and "beat 1" in log.read_text())
    second = start(folder, log, "hang")
    time.sleep(1.5)
    assert starts(log) == ["start 1"]
    first.kill()
    wait_for(lambda: starts(log) == ["start 1", "start 1"])
    second.send_signal(signal.SIGINT)
    assert (first.wait(timeout=10), second.wait(timeout=10)) == (-signal.SIGKILL, 130)


def test_training_step_refuses_what_its_worker_would_leave_out(tmp_path):
    from utils import experiments
    from utils.setups import TrainingSetup

    experiment = experiments.get("training-step")
    plain = {"model": "gpt2-124m", "seq_len": 1024, "micro_batch": 1}
    assert experiment.refuse(TrainingSetup(**plain)) == []
    beyond = {"zero_stage": 2, "world_size": 2, "liger": True, "precision": "bf16-master", "attention": "flash"}
    for field, value in {**beyond, "seq_len": 2048}.items():
        setup = TrainingSetup(**{**plain, field: value})
        (line,) = experiment.refuse(setup)
        assert line.startswith(f"{field}: ")
        with pytest.raises(measure.MeasureError, match=field):
            measure.run(experiment, [setup], folder=tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())
