"""Measures one training step in plain PyTorch: the peak of each phase, what is held between steps, the time.

`python -m utils.launch utils.workers.training_step '{"setup": {...}, "device": "cuda"}'` runs it alone;
`python -m utils measure training-step` runs it for a list of setups.

On "cuda" the bytes are PyTorch's allocator counters, read at each phase boundary. On "cpu" there are none, so live
tensors are counted (`utils.live_bytes`), and there is neither a reserved nor a device-level number: both repeat the
allocated one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time

import torch

from utils import launch
from utils.experiments.training_step import refuse
from utils.live_bytes import LiveBytes
from utils.measure import device_bytes_of_this_process, metric
from utils.memory import PHASES
from utils.setups import TrainingSetup

WARM_UP_STEPS = 2  # the first makes the optimizer states, the second finds the allocator settled
COUNTED_STEPS = 2
TIMED_STEPS = 10
TIMED_SECONDS = 2.5  # enough steps for a spread, few enough for a long list


def build_model(setup: TrainingSetup, device: str) -> torch.nn.Module:
    """The transformers model of a setup with random weights, in training mode."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**setup.architecture.hf_config())
    dtype = torch.float32 if setup.precision == "fp32-autocast" else torch.bfloat16
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=setup.attention, dtype=dtype)
    if setup.checkpointing == "full":
        # transformers renamed it in 5.24 and warns about the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    return model.train()


def build_optimizer(setup: TrainingSetup, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a setup over all parameters. Raises ImportError that names the package."""
    if setup.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-5)
    if setup.optimizer == "adamw-8bit":
        try:
            import bitsandbytes
        except ImportError:
            raise ImportError("optimizer: 'adamw-8bit' needs bitsandbytes; pip install bitsandbytes") from None
        return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-5)
    variant = {"adamw": {}, "adamw-single": {"foreach": False}, "adamw-fused": {"fused": True}}[setup.optimizer]
    return torch.optim.AdamW(model.parameters(), lr=1e-5, **variant)


class TrainingStep:
    """One training step that can be run again and again.

    `observe(phase)` is called after each forward and backward pass and after the optimizer, while all that the phase
    leaves is alive; after the last one the outputs go and the gradients with them.
    """

    def __init__(self, setup: TrainingSetup, device: str):
        self.setup = setup
        self.device = device
        self.model = build_model(setup, device)
        self.optimizer = build_optimizer(setup, self.model)
        shape = (setup.micro_batch, setup.seq_len)
        self.ids = torch.randint(setup.architecture.vocab_size, shape, device=device)

    def forward(self):
        autocast = contextlib.nullcontext()
        if self.setup.precision == "fp32-autocast":
            autocast = torch.autocast(torch.device(self.device).type, torch.bfloat16)
        with autocast:
            return self.model(input_ids=self.ids, labels=self.ids, use_cache=False)

    def run(self, observe=lambda phase: None) -> float:
        """One step; returns the last loss, so that a caller can see that it is a number."""
        for _ in range(self.setup.gradient_accumulation):
            outputs = self.forward()
            observe("forward")
            (outputs.loss / self.setup.gradient_accumulation).backward()
            observe("backward")
        self.optimizer.step()
        observe("step")
        loss = outputs.loss.detach()
        del outputs
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)


class CudaCounters:
    """Peaks by phase from PyTorch's caching allocator."""

    def __init__(self):
        self.peaks = dict.fromkeys(PHASES, 0)
        self.reserved = 0

    def start(self):
        torch.cuda.reset_peak_memory_stats()

    def observe(self, phase: str):
        self.peaks[phase] = max(self.peaks[phase], torch.cuda.max_memory_allocated())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    def held(self) -> int:
        return torch.cuda.memory_allocated()

    def device(self) -> int:
        return device_bytes_of_this_process()


class LiveTensorCounters:
    """Peaks by phase from the live tensors of a device without an allocator that counts."""

    def __init__(self, live: LiveBytes):
        self.live = live
        self.peaks = dict.fromkeys(PHASES, 0)

    def start(self):
        self.live.reset_peak()

    def observe(self, phase: str):
        self.peaks[phase] = max(self.peaks[phase], self.live.peak)
        self.live.reset_peak()

    def held(self) -> int:
        return self.live.current

    @property
    def reserved(self) -> int:
        return max(self.peaks.values())

    def device(self) -> int:
        return self.reserved


def measure(setup: TrainingSetup, device: str) -> dict:
    """All metrics of the experiment training-step for one setup."""
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            counters = CudaCounters()
        else:
            counters = LiveTensorCounters(stack.enter_context(LiveBytes(device)))
        launch.emit("progress", text="building the model")
        step = TrainingStep(setup, device)
        for number in range(WARM_UP_STEPS):
            launch.emit("progress", text=f"warm-up step {number + 1} of {WARM_UP_STEPS}")
            step.run()
        gc.collect()
        for _ in range(COUNTED_STEPS):
            counters.start()  # what the step before left has gone only now
            step.run(counters.observe)
        counted = {
            "peak": max(counters.peaks.values()),
            **{f"peak_{phase}": counters.peaks[phase] for phase in PHASES},
            "held": counters.held(),
            "reserved": counters.reserved,
            "device": counters.device(),
        }
    launch.emit("progress", text="timing")
    metrics = {name: metric([n_bytes], "bytes") for name, n_bytes in counted.items()}
    metrics["step_ms"] = metric(_time_steps(step, device), "ms")
    return metrics


def _time_steps(step: TrainingStep, device: str) -> list[float]:
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < TIMED_STEPS and (len(times) < 3 or time.perf_counter() - began < TIMED_SECONDS):
        start = time.perf_counter()
        step.run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return times


def _prepare(setup: TrainingSetup) -> None:
    """Import all that the step imports when it is first used, so that the card does not wait for it."""
    import torch._dynamo  # noqa: F401  by the optimizers and by checkpointing

    build_optimizer(setup, build_model(setup, "meta"))


def main(payload: dict) -> None:
    setup = TrainingSetup.from_dict(payload["setup"])
    if refused := refuse(setup):
        launch.emit("failed", reason="; ".join(refused))
        return
    device = payload["device"]
    if device == "cuda":
        _prepare(setup)
        launch.take_gpu_turn()
    try:
        launch.emit("result", metrics=measure(setup, device))
    except torch.OutOfMemoryError as error:
        launch.emit("oom", reason=launch.one_line(str(error).split(". Of the allocated memory")[0]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
