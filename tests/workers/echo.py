"""A worker that does what its setup says, for the tests of launching, measuring and recording.

Also an experiment of its own ("echo"), so that the tests need neither torch nor a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from utils import launch
from utils.errors import InputError
from utils.experiments import Experiment

BEHAVIOURS = ("ok", "slow", "oom", "oom-uncaught", "fail", "hang", "hang-child", "die", "exit", "nonsense", "part")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EchoSetup:
    """`log`: a file that gets a line "start N" when the worker starts, and "beat N" while it hangs."""

    number: int
    behaviour: str = "ok"
    log: str = ""

    @classmethod
    def from_dict(cls, fields: dict) -> EchoSetup:
        if set(fields) - {"number", "behaviour", "log"} or type(fields.get("number")) is not int:
            raise InputError(f"number: {fields!r}: a whole number is required")
        return cls(**fields)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def canonical(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))


EXPERIMENT = Experiment(
    name="echo",
    worker="echo",
    method_version=1,
    metrics={"peak": "bytes", "step_ms": "ms"},
    setup_type=EchoSetup,
    setups=lambda: [EchoSetup(number=number) for number in range(3)],
)


def _write(path: str, line: str) -> None:
    if path:
        with open(path, "a") as file:
            file.write(line + "\n")


def _beat(path: str, number: int) -> None:
    while True:
        _write(path, f"beat {number}")
        time.sleep(0.05)


def main(payload: dict) -> None:
    setup = EchoSetup.from_dict(payload["setup"])
    _write(setup.log, f"start {setup.number}")
    print("a line of log")
    launch.emit("progress", text="at work")
    if setup.behaviour == "slow":
        time.sleep(0.5)
    if setup.behaviour == "hang":
        _beat(setup.log, setup.number)
    if setup.behaviour == "hang-child":
        # The child outlives its parent, holds stdout open, and is in no one's list of processes.
        subprocess.Popen([sys.executable, "-c", f"import echo; echo._beat({setup.log!r}, {setup.number})"])
        while "beat" not in Path(setup.log).read_text():
            time.sleep(0.02)
    if setup.behaviour == "die":
        os.kill(os.getpid(), 9)
    if setup.behaviour == "exit":
        sys.exit(3)
    if setup.behaviour == "fail":
        raise ValueError("the head does not\tfit the hat")
    if setup.behaviour == "oom-uncaught":
        raise type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if setup.behaviour == "oom":
        launch.emit(
            "oom",
            reason="tried to allocate\n2.00 GiB in the backward pass",
            metrics={"step_ms": {"unit": "ms", "median": 2.5, "p20": 2.0, "p80": 3.0, "repetitions": 3}},
        )
        return
    peak = {"unit": "bytes", "median": 1000 + setup.number, "p20": 1000, "p80": 2000, "repetitions": 3}
    step = {"unit": "ms", "median": 2.5, "p20": 2.0, "p80": 3.0, "repetitions": 3}
    if setup.behaviour == "nonsense":
        peak["median"] = "many"
    if setup.behaviour == "part":
        launch.emit("result", metrics={"peak": peak})
        return
    launch.emit("result", metrics={"peak": peak, "step_ms": step})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
