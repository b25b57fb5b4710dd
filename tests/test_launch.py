"""Workers end as they should, and none outlives its caller."""

from __future__ import annotations

import concurrent.futures
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from utils import launch

pytestmark = pytest.mark.usefixtures("echo")


def run(behaviour: str, log: Path | str = "", timeout_s: float = 30, **options) -> launch.WorkerResult:
    payload = {"setup": {"number": 1, "behaviour": behaviour, "log": str(log)}}
    return launch.run_worker("echo", payload, timeout_s=timeout_s, **options)


def wait_for(condition, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def beats(log: Path) -> int:
    return log.read_text().count("beat") if log.exists() else 0


def assert_no_more_beats(log: Path) -> None:
    """The process that writes to `log` every 50 ms is gone, at the latest two seconds from now."""
    end = time.monotonic() + 2
    while True:
        before = beats(log)
        time.sleep(0.4)
        if beats(log) == before:
            return
        assert time.monotonic() < end, "a worker is still alive"


def test_a_result_comes_back_with_its_events_and_log():
    seen = []
    result = run("ok", on_event=seen.append)
    assert (result.status, result.reason) == ("ok", "")
    assert [event["event"] for event in seen] == ["progress", "result"]
    assert result.events == seen
    assert result.last["metrics"]["peak"]["median"] == 1001
    assert result.log == ["a line of log"]


@pytest.mark.parametrize(
    ("behaviour", "status", "reason"),
    [
        ("oom", "oom", "tried to allocate 2.00 GiB in the backward pass"),
        ("oom-uncaught", "oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("fail", "failed", "exit code 1 without a result: ValueError: the head does not fit the hat"),
        ("exit", "failed", "exit code 3 without a result: a line of log"),
        (
            "die",
            "failed",
            "killed by signal SIGKILL (the kernel does this when the host is out of memory): a line of log",
        ),
    ],
)
def test_a_bad_end_has_a_status_and_a_reason_in_one_line(behaviour, status, reason):
    result = run(behaviour)
    # Python 3.10 names an exception of the main module with its module.
    assert (result.status, result.reason.removeprefix("__main__.")) == (status, reason)


def test_a_module_that_does_not_exist_is_a_failure():
    result = launch.run_worker("no_such_worker", {}, timeout_s=30)
    assert result.status == "failed"
    assert "no_such_worker" in result.reason


def test_a_long_reason_keeps_its_end():
    line = launch.one_line("word " * 200 + "\x1b[31mthe\nend")
    assert len(line) <= launch.REASON_CHARACTERS
    assert line.startswith("… ") and line.endswith("the end") and line.isprintable()


def test_a_hanging_worker_is_killed_when_its_time_is_up(tmp_path):
    start = time.monotonic()
    result = run("hang", tmp_path / "log", timeout_s=1)
    assert (result.status, result.reason) == ("failed", "no result after 1 s: a line of log")
    assert time.monotonic() - start < 5
    assert beats(tmp_path / "log") > 0
    assert_no_more_beats(tmp_path / "log")


def test_a_process_that_the_worker_left_behind_is_killed(tmp_path):
    """It holds the worker's stdout open, so a caller that waits for the end of it waits for ever."""
    start = time.monotonic()
    assert run("hang-child", tmp_path / "log").status == "ok"
    assert time.monotonic() - start < 10
    assert beats(tmp_path / "log") > 0
    assert_no_more_beats(tmp_path / "log")


def test_cancel_kills_the_worker(tmp_path):
    cancel = threading.Event()
    results = []
    thread = threading.Thread(target=lambda: results.append(run("hang", tmp_path / "log", cancel=cancel)))
    thread.start()
    wait_for(lambda: beats(tmp_path / "log") > 0)
    cancel.set()
    thread.join(timeout=5)
    assert [result.status for result in results] == ["cancelled"]
    assert_no_more_beats(tmp_path / "log")


CALLER = """
import sys
from utils import launch
launch.run_worker("echo", {"setup": {"number": 1, "behaviour": "hang", "log": sys.argv[1]}}, timeout_s=60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_worker_outlives_its_caller(tmp_path, number):
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(tmp_path / "log")], cwd=launch.ROOT, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: beats(tmp_path / "log") > 0)
    caller.send_signal(number)
    assert caller.wait(timeout=5) != 0
    assert_no_more_beats(tmp_path / "log")


TURN = """
import json, os, sys, time
from utils import launch
log = json.loads(sys.argv[1])["log"]
launch.take_gpu_turn()
with open(log, "a") as file:
    file.write("in\\n")
launch.emit("result", metrics={})
time.sleep(0.3)  # what the driver needs to free the memory of a dying process
with open(log, "a") as file:
    file.write("out\\n")
"""


def test_a_turn_on_the_gpu_lasts_until_the_worker_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"test-{tmp_path.name}")
    (tmp_path / "turn.py").write_text(TURN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        payload = {"log": str(tmp_path / "log")}
        runs = [pool.submit(launch.run_worker, "turn", payload, timeout_s=30) for _ in range(3)]
    assert [run.result().status for run in runs] == ["ok"] * 3
    assert (tmp_path / "log").read_text().split() == ["in", "out"] * 3


def test_waiting_for_a_turn_does_not_use_up_the_time(monkeypatch, tmp_path):
    import filelock

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"test-{tmp_path.name}")
    (tmp_path / "turn.py").write_text(
        "from utils import launch\nlaunch.take_gpu_turn()\nlaunch.emit('result', metrics={})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with filelock.FileLock(launch.gpu_lock_path()):
        results = []
        thread = threading.Thread(
            target=lambda: results.append(launch.run_worker("turn", {}, timeout_s=2)), daemon=True
        )
        thread.start()
        time.sleep(3)
        assert not results
    thread.join(timeout=20)
    assert [result.status for result in results] == ["ok"]
