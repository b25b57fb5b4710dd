"""Start workers, follow what they report, and leave none behind.

A worker is a module that is run in a process of its own, `python -m MODULE JSON`. It prints events to stdout, one JSON
object a line with "@@ " before it; all else that it prints is its log. One process a setup, because then a peak is the
peak of that setup alone, and one that dies takes nothing with it.

    {"event": "progress", "text": ...}                     what it is doing
    {"event": "result", "metrics": {...}}                  metric -> unit, median, p20, p80, repetitions
    {"event": "oom", "reason": ..., "metrics": {...}}      out of memory; metrics that were taken before
    {"event": "failed", "reason": ...}

Every worker leads its own process group. The group is killed when the worker ends, when its time is up, when the caller
is interrupted, and (by a thread in the worker that waits for the end of its stdin) when the caller itself is killed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import queue
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "@@ "
LOG_LINES = 200
REASON_CHARACTERS = 300
POLL_SECONDS = 0.1
TURN = "t"  # what a caller writes to a worker whose turn it is
TURNS_VARIABLE = "LLM_TRAINING_TURNS"  # in the environment of workers whose caller gives turns


@dataclasses.dataclass
class WorkerResult:
    """How a worker ended. `status` is ok, oom, failed or cancelled; `reason` is one line, empty when ok."""

    status: str
    reason: str
    events: list[dict]
    log: list[str]
    seconds: float

    @property
    def last(self) -> dict:
        """The event that decided the status; empty if the worker ended without one."""
        return next((event for event in reversed(self.events) if event["event"] in ("result", "oom", "failed")), {})


# ---- the caller's side


def run_worker(
    module: str,
    payload: dict,
    *,
    timeout_s: float,
    on_event: Callable[[dict], None] | None = None,
    cancel: threading.Event | None = None,
) -> WorkerResult:
    """Run one worker to its end and return what it reported; never raises for anything the worker does.

    `timeout_s` does not count the time in which the worker waits for its turn on the GPU (`take_gpu_turn`); the turn
    ends when the process has ended, because only then its memory is free. `on_event` is called with each event as it
    comes. Setting `cancel` from another thread kills the worker.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "utils.launch", module, json.dumps(payload)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env=_worker_environment(),
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
    reader.start()
    result = WorkerResult("failed", "", [], [], 0.0)
    log: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
    stopped = None  # why the worker was killed by us
    deadline = started + timeout_s
    turn = _Turn()
    try:
        line: str | None = ""
        while line is not None:
            if turn.wanted and turn.taken():
                deadline = time.monotonic() + timeout_s
                with contextlib.suppress(BrokenPipeError):  # it died while it waited
                    process.stdin.write(TURN)
                    process.stdin.flush()
            try:
                line = lines.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if process.poll() is not None:
                    # A child of the worker may hold stdout open: without this the end of it would never come.
                    _kill_group(process)
                elif cancel is not None and cancel.is_set():
                    stopped = "cancelled"
                    _kill_group(process)
                elif time.monotonic() > deadline:
                    stopped = f"no result after {timeout_s:g} s"
                    _kill_group(process)
                continue
            event = _parse_event(line)
            if event is None:
                log.append((line or "").rstrip())
                continue
            result.events.append(event)
            if event["event"] == "waiting":
                deadline = float("inf")
                turn.wanted = True
            if on_event is not None:
                on_event(event)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)  # stdout is at its end, so the worker is about to exit
    finally:
        _kill_group(process)
        process.wait()
        turn.give_back()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        reader.join()
        process.stdout.close()
    result.log = [text for text in log if text]
    result.seconds = time.monotonic() - started
    result.status, result.reason = _verdict(result, process.returncode, stopped)
    return result


def _worker_environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        TURNS_VARIABLE: "1",
    }


def _read_lines(stream, lines: queue.SimpleQueue) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, for a group of zombies
        os.killpg(process.pid, signal.SIGKILL)


def _parse_event(line: str | None) -> dict | None:
    if line is None or not line.startswith(MARK):
        return None
    try:
        event = json.loads(line[len(MARK) :])
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _verdict(result: WorkerResult, returncode: int, stopped: str | None) -> tuple[str, str]:
    kind = result.last.get("event")
    if kind == "result":
        return "ok", ""
    if kind is not None:
        return kind, one_line(result.last.get("reason") or "the worker gave no reason")
    if stopped == "cancelled":
        return "cancelled", "cancelled"
    tail = _last_words(result.log)
    if stopped is None and "OutOfMemoryError" in tail:
        return "oom", one_line(tail)
    if stopped is None and returncode < 0:
        stopped = f"killed by signal {signal.Signals(-returncode).name}"
        if returncode == -signal.SIGKILL:
            stopped += " (the kernel does this when the host is out of memory)"
    elif stopped is None:
        stopped = f"exit code {returncode} without a result"
    return "failed", one_line(f"{stopped}: {tail}" if tail else stopped)


def _last_words(log: list[str]) -> str:
    """The exception of the last traceback, without the frames; without a traceback the last lines."""
    starts = [number for number, line in enumerate(log) if line.startswith("Traceback (most recent call last)")]
    if starts:
        log = [line for line in log[starts[-1] + 1 :] if not line.startswith(" ")]
    return " | ".join(log[-3:])


def one_line(text: object) -> str:
    """Any text as one printable line of at most 300 characters; the end is kept, where the error stands."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if len(line) <= REASON_CHARACTERS else "… " + line[-REASON_CHARACTERS + 2 :].lstrip()


def gpu_lock_path() -> Path:
    """The lock of the GPU that this process sees: one a user, because another user's file could not be opened."""
    gpu = re.sub(r"[^\w.-]", "_", os.environ.get("CUDA_VISIBLE_DEVICES") or "0")
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"llm-training-gpu-{user}-{gpu}.lock"


class _Turn:
    """A worker's turn on the GPU, kept by its caller, who knows when the process and its memory are gone."""

    def __init__(self):
        self.wanted = False
        self._lock = None

    def taken(self) -> bool:
        """Try to get what is wanted."""
        import filelock

        lock = filelock.FileLock(gpu_lock_path(), thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return False
        self.wanted, self._lock = False, lock
        return True

    def give_back(self) -> None:
        if self._lock is not None:
            self._lock.release()


# ---- the worker's side


def emit(event: str, **fields) -> None:
    """Report an event to whoever started this worker."""
    print(MARK + json.dumps({"event": event, **fields}), flush=True)


def take_gpu_turn() -> None:
    """Wait until this worker has the GPU to itself among this user's workers, until its process ends.

    Imports belong before it, so that the next worker is ready when this one is done. Without turns, two workers on one
    card would slow down each other, and one would report out of memory because of the other. A worker that no
    `run_worker` has started does not wait.
    """
    if TURNS_VARIABLE in os.environ:
        emit("waiting")
        _turn.wait()
        emit("turn")


_turn = threading.Event()


def _die_with_caller() -> None:
    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def wait() -> None:
        while os.read(lifeline, 1):  # TURN, or nothing at the end
            _turn.set()
        if hasattr(os, "killpg"):
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _main(module: str, payload: str) -> None:
    _die_with_caller()
    sys.argv = [module, payload]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # By its name, so that the worker, which imports this module, shares its state.
    from utils import launch

    launch._main(*sys.argv[1:])
