"""`training-step`: peak memory by phase and time of one training step on one GPU, plain PyTorch.

The list is ordered by value, so that a run which is cut short has measured a bit of everything. It is made for one
GPU of about 140 GiB; on a smaller one more of the rows read "out of memory", which is a result too.
"""

from __future__ import annotations

from utils.experiments import Experiment
from utils.setups import PLAIN_PYTORCH, TrainingSetup


def _setup(model: str, seq_len: int, micro_batch: int = 1, **fields) -> TrainingSetup:
    return TrainingSetup(model=model, seq_len=seq_len, micro_batch=micro_batch, **fields)


_FULL = {"checkpointing": "full"}
_EAGER = {"attention": "eager"}
_AUTOCAST = {"precision": "fp32-autocast"}


def unseen() -> list[TrainingSetup]:
    """Chosen after the forecast was finished: they show how it does where nobody has looked."""
    return [
        _setup("qwen2.5-1.5b", 4096, 2, **_AUTOCAST, **_FULL, optimizer="adamw-fused"),
        _setup("llama-3.2-3b", 8192, optimizer="adamw-8bit"),
        _setup("gpt2-1.5b", 1024, 2, **_AUTOCAST, **_EAGER, **_FULL, optimizer="sgd"),
        _setup("qwen3-1.7b", 1024, 4, **_AUTOCAST, **_EAGER, optimizer="adamw-single", gradient_accumulation=2),
        _setup("tinyllama-1.1b", 512, **_AUTOCAST),
        _setup("llama-2-7b", 1024, 4, **_EAGER, **_FULL, optimizer="adamw-8bit"),
        _setup("smollm2-135m", 1024, 2, **_AUTOCAST, optimizer="adamw-8bit"),
        _setup("mistral-7b", 8192, **_FULL, optimizer="adamw-single"),
    ]


def setups() -> list[TrainingSetup]:
    """Every setup, in the order in which they are measured."""
    return [
        # The thread of the book, and one setup of every kind.
        _setup("llama-3.1-8b", 4096),
        _setup("llama-3.2-1b", 4096),
        _setup("llama-3.2-1b", 4096, **_EAGER),
        _setup("llama-3.2-1b", 4096, **_FULL),
        _setup("llama-3.2-1b", 4096, **_AUTOCAST),
        _setup("llama-3.2-1b", 4096, optimizer="adamw-8bit"),
        _setup("llama-3.2-1b", 4096, optimizer="sgd"),
        _setup("llama-3.2-1b", 4096, optimizer="adamw-fused"),
        _setup("llama-3.2-1b", 4096, optimizer="adamw-single"),
        _setup("gpt2-1.5b", 1024, 4),
        _setup("qwen2.5-0.5b", 4096),
        _setup("qwen3-1.7b", 4096),
        _setup("smollm2-360m", 2048, 4),
        _setup("tinyllama-1.1b", 2048, 4),
        _setup("mistral-7b", 4096, optimizer="adamw-8bit"),
        _setup("llama-3.1-8b", 8192, optimizer="adamw-8bit", **_FULL),
        # The sequence, from short (the step decides) to long (the logits decide).
        _setup("llama-3.2-1b", 512),
        _setup("llama-3.2-1b", 2048),
        _setup("llama-3.2-1b", 8192),
        _setup("llama-3.2-1b", 16384),
        _setup("llama-3.2-1b", 16384, **_FULL),
        _setup("llama-3.2-1b", 32768, **_FULL),
        _setup("llama-3.2-1b", 2048, **_EAGER),
        _setup("qwen2.5-0.5b", 32768, **_FULL),
        _setup("qwen3-1.7b", 16384, optimizer="adamw-8bit"),
        _setup("qwen2.5-7b", 8192, **_FULL),
        # The batch, and gradient accumulation.
        _setup("llama-3.2-1b", 1024, 4),
        _setup("llama-3.2-1b", 1024, 16),
        _setup("smollm2-360m", 512, 16),
        _setup("qwen2.5-0.5b", 1024, 8),
        _setup("gpt2-1.5b", 512, 8, **_FULL),
        _setup("llama-3.2-1b", 4096, gradient_accumulation=4),
        _setup("llama-3.2-1b", 1024, 4, gradient_accumulation=2, **_AUTOCAST),
        _setup("qwen2.5-0.5b", 2048, 2, gradient_accumulation=4, **_EAGER),
        _setup("mistral-7b", 2048, gradient_accumulation=2, optimizer="adamw-8bit"),
        # fp32 parameters with autocast, with and without checkpointing.
        _setup("smollm2-360m", 2048, 4, **_AUTOCAST),
        _setup("qwen2.5-0.5b", 4096, **_AUTOCAST, **_FULL),
        _setup("gpt2-1.5b", 1024, 4, **_AUTOCAST),
        _setup("qwen3-1.7b", 2048, 2, **_AUTOCAST, optimizer="adamw-fused"),
        _setup("llama-3.2-3b", 4096, **_AUTOCAST, **_FULL),
        _setup("tinyllama-1.1b", 2048, 4, **_AUTOCAST, **_EAGER),
        _setup("llama-3.1-8b", 2048, **_AUTOCAST, optimizer="adamw-8bit"),
        # Eager attention: when the scores decide.
        _setup("smollm2-360m", 2048, 2, **_EAGER),
        _setup("gpt2-1.5b", 1024, 8, **_EAGER),
        _setup("tinyllama-1.1b", 2048, 2, **_EAGER, **_FULL),
        _setup("qwen3-1.7b", 4096, **_EAGER, **_FULL),
        _setup("mistral-7b", 2048, **_EAGER, optimizer="sgd"),
        # Models of 3B to 8B: every optimizer once.
        _setup("llama-3.2-3b", 4096),
        _setup("llama-3.2-3b", 2048, 2, optimizer="adamw-single"),
        _setup("llama-2-7b", 4096, **_FULL),
        _setup("llama-2-7b", 2048, optimizer="sgd"),
        _setup("mistral-7b", 4096, optimizer="adamw-fused", **_FULL),
        _setup("qwen2.5-7b", 4096, optimizer="adamw-8bit"),
        _setup("qwen3-8b", 4096, optimizer="adamw-single", **_FULL),
        _setup("qwen3-8b", 2048, optimizer="adamw-8bit"),
        _setup("llama-3.1-8b", 512),
        _setup("llama-3.1-8b", 2048, 4, optimizer="adamw-8bit"),
        _setup("llama-3.1-8b", 4096, optimizer="sgd"),
        # Few tokens: the optimizer step decides.
        _setup("llama-3.2-3b", 512),
        _setup("smollm2-360m", 512),
        _setup("qwen3-1.7b", 512, **_AUTOCAST),
        _setup("qwen2.5-7b", 1024, **_FULL),
        # Full fine-tuning of 8B in less, and the one regime in which the forward pass decides.
        _setup("llama-3.1-8b", 4096, **_FULL, optimizer="adamw-fused"),
        _setup("llama-3.1-8b", 4096, **_FULL, optimizer="sgd"),
        _setup("llama-3.1-8b", 4096, **_FULL),
        _setup("llama-3.1-8b", 4096, optimizer="adamw-fused"),
        _setup("llama-3.1-8b", 512, **_FULL),
        _setup("llama-3.2-1b", 4096, **_AUTOCAST, **_FULL, gradient_accumulation=4, optimizer="adamw-fused"),
        # Out of memory on 140 GiB, each for another reason: parameters and states, scores, stored activations, logits.
        _setup("llama-3.1-8b", 2048, **_AUTOCAST),
        _setup("llama-3.2-1b", 16384, **_EAGER),
        _setup("llama-2-7b", 4096, 8),
        _setup("qwen2.5-0.5b", 32768, 8, **_FULL),
        *unseen(),
    ]


def refuse(setup: TrainingSetup) -> list[str]:
    """Why the worker, which is plain PyTorch, cannot run a setup; empty if it can."""
    errors = setup.beyond(PLAIN_PYTORCH, "training-step does not run")
    longest = setup.architecture.max_positions
    if setup.architecture.learned_positions and setup.seq_len > longest:
        errors.append(
            f"seq_len: {setup.model} cannot take {setup.seq_len}; up to {longest}, the rows of its position table"
        )
    return errors


EXPERIMENT = Experiment(
    name="training-step",
    worker="utils.workers.training_step",
    method_version=1,
    metrics={
        "peak": "bytes",
        "peak_forward": "bytes",
        "peak_backward": "bytes",
        "peak_step": "bytes",
        "held": "bytes",
        "reserved": "bytes",
        "device": "bytes",
        "step_ms": "ms",
    },
    setup_type=TrainingSetup,
    setups=setups,
    refuse=refuse,
)
