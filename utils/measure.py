"""Measure the setups of an experiment, each in a process of its own, and write the rows as they come.

Also the two helpers that every measurement shares: `metric`, a median with its spread, and `environment`, the stamp
that says on what a number was taken.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from utils import launch, records
from utils.errors import InputError
from utils.experiments import Experiment, label
from utils.units import GIB, gib

# Libraries whose version can change a measured number.
LIBRARIES = ("transformers", "triton", "bitsandbytes", "deepspeed", "liger-kernel", "flash-attn-4")
PROBE_TIMEOUT_S = 300


class MeasureError(InputError):
    """A measurement that cannot start."""


def metric(values: Sequence[float], unit: str) -> dict:
    """Median, 20th and 80th percentile (linear interpolation) of repeated measurements, as a worker reports them.

    Whole numbers give whole numbers: a byte count stays one.
    """
    ordered = sorted(values)
    p20, p80 = ordered[0], ordered[-1]
    if len(ordered) > 1:
        p20, _, _, p80 = statistics.quantiles(ordered, n=5, method="inclusive")
    spread = {"median": statistics.median(ordered), "p20": p20, "p80": p80}
    if all(isinstance(value, int) for value in ordered):
        spread = {name: round(value) for name, value in spread.items()}
    return {"unit": unit, **spread, "repetitions": len(ordered)}


# ---- the machine


def environment(device: str | None = None) -> dict:
    """The stamp of this machine: GPU, driver, CUDA, torch, libraries, commit. `device` defaults to the GPU if any.

    Raises `MeasureError` for device "cuda" where torch sees no CUDA GPU.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        built = f"is built for CUDA {torch.version.cuda} but finds no GPU" if torch.version.cuda else "is a CPU build"
        raise MeasureError(
            f"device: 'cuda': torch {torch.__version__} {built}; --device cpu counts the bytes of tensors instead"
        )
    on_gpu = has_gpu and device != "cpu"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu",
        "gpu_count": torch.cuda.device_count() if on_gpu else 0,
        "driver": driver_version() if on_gpu else "",
        "cuda": torch.version.cuda or "unknown" if on_gpu else "",
        "torch": torch.__version__,
        "libraries": {"python": platform.python_version(), **library_versions()},
        "commit": commit(),
    }


def library_versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def driver_version() -> str:
    """The NVIDIA driver's version, from nvidia-smi or NVML; "unknown" where neither is installed."""
    if answer := _nvidia_smi("driver_version"):
        return answer[0]
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version
    except Exception:  # no module, no library, no device: each has its own error class
        return "unknown"


def _nvidia_smi(query: str) -> list[str]:
    """One answer a GPU; none where nvidia-smi is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def device_bytes_of_this_process() -> int:
    """Bytes that this process holds on its first GPU: tensors, cached blocks, CUDA context and loaded kernels.

    From NVML, which counts by process; where it cannot be asked (package nvidia-ml-py), what is in use on the whole
    device, which is the same on a machine with nothing else to do.
    """
    import torch

    with contextlib.suppress(Exception):  # no module, no permission, no such process: each has its own error class
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return process.usedGpuMemory
    free, total = torch.cuda.mem_get_info()
    return total - free


def commit() -> str:
    """The book's git commit, "-dirty" if a tracked file outside data/ has changes; "unknown" without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(records.ROOT), *arguments], capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != records.ROOT:
            return "unknown"  # installed inside some other repository
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!data")
        return git("rev-parse", "HEAD") + ("-dirty" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def utc_now() -> str:
    # To the millisecond: the rows of one run have one time, and two runs of a setup must not have the same.
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _probe(device: str) -> dict:
    """`environment` from a process of its own: this one must not hold a CUDA context while others are measured."""
    result = launch.run_worker("utils.measure", {"device": device}, timeout_s=PROBE_TIMEOUT_S)
    if result.status != "ok":
        raise MeasureError(result.reason)
    return result.last["environment"]


# ---- the run


@dataclasses.dataclass
class _Run:
    """The state that the threads of one `run` share. Each thread runs one worker at a time."""

    experiment: Experiment
    path: Path
    device: str
    environment: dict
    timeout_s: float
    again: bool
    stream: object
    total: int
    live: bool
    queue: collections.deque = dataclasses.field(default_factory=collections.deque)
    tally: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    cancel: threading.Event = dataclasses.field(default_factory=threading.Event)
    print_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    started: float = dataclasses.field(default_factory=time.monotonic)

    def key(self, setup) -> tuple:
        return (setup.canonical(), self.environment["gpu"], self.environment["torch"], self.experiment.method_version)

    def finished(self) -> set[tuple]:
        """Keys of the setups that have a result in the file. A failed one is tried again."""
        if not self.path.exists():
            return set()
        rows = records.read_file(self.path, self.experiment.name)
        return {record.key for record in rows if record.status != "failed"}


def run(
    experiment: Experiment,
    setups: Sequence | None = None,
    *,
    folder: Path = records.LOCAL,
    device: str = "cuda",
    jobs: int = 1,
    timeout_s: float = 600,
    again: bool = False,
    stream=None,
) -> collections.Counter:
    """Measure every setup that has no result in `folder/<experiment>.csv` yet; returns how many ended how.

    All rows of a setup are written at once when its worker ends, so a run that is killed has lost no finished setup,
    and the next one goes on. Several runs may share one file, also on several GPUs: each setup is taken by one of them.
    `again` measures also what has a result. Progress goes to `stream` (stderr).

    Raises `MeasureError` if it cannot start, `RecordError` if the file is damaged, `KeyboardInterrupt` after the
    workers were stopped.
    """
    folder = Path(folder)
    if device == "cpu" and folder.resolve() == records.DATA:
        raise MeasureError("--device: 'cpu': data/ holds GPU measurements only; leave out --out for data/local")
    setups = list(dict.fromkeys(experiment.setups() if setups is None else setups))
    if refused := list(dict.fromkeys(line for setup in setups for line in experiment.refuse(setup))):
        raise MeasureError(*refused)
    path = records.path_of(experiment.name, folder)
    stream = sys.stderr if stream is None else stream
    if path.exists():
        records.read_file(path, experiment.name)  # a damaged file is named before minutes of work, not after
    state = _Run(
        experiment,
        path,
        device,
        _probe(device),
        timeout_s,
        again,
        stream,
        total=len(setups),
        live=jobs == 1 and stream.isatty(),
        queue=collections.deque(enumerate(setups, start=1)),
    )
    if not again:
        done = state.finished()
        state.queue = collections.deque(item for item in state.queue if state.key(item[1]) not in done)
        state.tally["skipped"] = len(setups) - len(state.queue)
    _announce(state, jobs)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            loops = [pool.submit(_loop, state) for _ in range(min(jobs, len(state.queue)))]
            # In short waits: a thread that waits without end does not see Ctrl-C on every system.
            while concurrent.futures.wait(loops, timeout=0.2).not_done:
                if any(loop.done() and loop.exception() for loop in loops):
                    break
        finally:
            state.cancel.set()  # when all are done there is nobody left to hear it
    for loop in loops:
        loop.result()
    return state.tally


def _announce(state: _Run, jobs: int) -> None:
    stamp = state.environment
    print(
        f"{state.experiment.name} on {stamp['gpu']}, torch {stamp['torch']}: {len(state.queue)} of {state.total} "
        f"setups to measure, into {records.shown(state.path)}",
        file=state.stream,
        flush=True,
    )
    if state.device == "cuda" and state.queue:
        used = max(
            (int(answer) * 2**20 for answer in _nvidia_smi("memory.used") if answer.strip().isdigit()), default=0
        )
        if used > GIB:
            print(f"warning: other processes hold {gib(used, 1)} of this GPU", file=state.stream, flush=True)


def _loop(state: _Run) -> None:
    """Take setups until none is left. One that another run is measuring is put back, and looked at again later."""
    import filelock

    while not state.cancel.is_set():
        try:
            number, setup = state.queue.popleft()
        except IndexError:
            return
        name = hashlib.sha256(repr(state.key(setup)).encode()).hexdigest()[:16]
        claim = filelock.FileLock(records.lock_folder(state.path.parent) / f"{name}.lock")
        try:
            with claim.acquire(timeout=0):
                if not state.again and state.key(setup) in state.finished():
                    state.tally["skipped"] += 1
                else:
                    _measure(state, number, setup)
        except filelock.Timeout:
            state.queue.append((number, setup))
            state.cancel.wait(0.5)


def _measure(state: _Run, number: int, setup) -> None:
    head = f"[{number:{len(str(state.total))}}/{state.total}] {label(setup)} …"

    def show(event: dict) -> None:
        if state.live:
            line = f"{head} {event.get('text', '')}"[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{line}", end="", file=state.stream, flush=True)

    show({})
    result = launch.run_worker(
        state.experiment.worker,
        {"setup": setup.to_dict(), "device": state.device},
        timeout_s=state.timeout_s,
        on_event=show,
        cancel=state.cancel,
    )
    if result.status == "cancelled":
        return
    rows = _rows(state, setup, result)
    records.append(state.path, rows)
    with state.print_lock:
        state.tally[rows[0].status] += 1
        clear = "\r\x1b[K" if state.live else ""
        print(f"{clear}{head} {_outcome(state, rows)}{_remaining(state)}", file=state.stream, flush=True)


def _rows(state: _Run, setup, result: launch.WorkerResult) -> list[records.Record]:
    experiment = state.experiment
    stamp = state.environment
    common = {
        **{name: stamp[name] for name in ("gpu", "gpu_count", "driver", "cuda", "torch", "commit")},
        "experiment": experiment.name,
        "setup": setup.canonical(),
        "libraries": records.canonical_json(stamp["libraries"]),
        "utc": utc_now(),
        "method_version": experiment.method_version,
    }

    def row(name: str, values: dict, status: str, reason: str) -> records.Record:
        spread = {key: values.get(key) for key in ("unit", "median", "p20", "p80", "repetitions")}
        return records.Record(metric=name, status=status, reason=reason, **spread, **common)

    nothing = {"unit": experiment.metrics[experiment.headline], "repetitions": 0}
    measured = {} if result.status == "failed" else dict(result.last.get("metrics", {}))
    if result.status != "ok":
        measured[experiment.headline] = nothing
    try:
        missing = set(experiment.metrics) - set(measured)
        if result.status == "ok" and missing:
            raise records.RecordError(f"no {', '.join(sorted(missing))}")
        return [row(name, values, result.status, result.reason) for name, values in measured.items()]
    except records.RecordError as error:
        reason = f"the worker reported what is not a record: {'; '.join(error.errors)}"
        return [row(experiment.headline, nothing, "failed", launch.one_line(reason))]


def _outcome(state: _Run, rows: list[records.Record]) -> str:
    if rows[0].status != "ok":
        return f"{'out of memory' if rows[0].status == 'oom' else 'failed'}: {rows[0].reason}"
    parts = []
    for row in rows:
        if row.metric == state.experiment.headline:
            parts.insert(0, f"{row.metric} {gib(row.median, 1) if row.unit == 'bytes' else row.median}")
        elif row.unit == "ms":
            parts.append(f"{row.median:.0f} ms")
    return "  ".join(parts)


def _remaining(state: _Run) -> str:
    finished = sum(count for status, count in state.tally.items() if status != "skipped")
    if not state.queue:
        return ""
    seconds = (time.monotonic() - state.started) / finished * len(state.queue)
    return f"  (about {seconds / 60:.0f} min left)" if seconds >= 90 else f"  (about {seconds:.0f} s left)"


def main(payload: dict) -> None:
    """The worker behind `_probe`."""
    try:
        launch.emit("result", metrics={}, environment=environment(payload["device"]))
    except MeasureError as error:
        launch.emit("failed", reason=str(error))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
