"""A training setup: everything that decides how much memory a step needs.

:class:`TrainingSetup` is checked when it is made, so that whoever holds one can trust it. It reads and
writes JSON, and its canonical form is the key under which measurements are recorded.

Only the standard library is imported: the command line, the notebooks and the calculator page run this
file unchanged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from utils.errors import InputError, did_you_mean
from utils.models import Architecture, ModelError, get

PRECISIONS = ("bf16", "fp32-autocast", "bf16-master")
ATTENTIONS = ("eager", "sdpa", "flash")
CHECKPOINTING = ("none", "full")
OPTIMIZERS = ("adamw", "adamw-single", "adamw-fused", "adamw-8bit", "sgd")
OFFLOAD = ("none", "cpu", "nvme")
METHODS = ("full", "lora", "qlora")
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# What plain PyTorch on one GPU is: the values that the forecast models and the experiments run so far. The others
# arrive with their chapters.
PLAIN_PYTORCH = {
    "world_size": (1,),
    "zero_stage": (None,),
    "precision": ("bf16", "fp32-autocast"),
    "attention": ("eager", "sdpa"),
    "liger": (False,),
    "method": ("full",),
}

_CHOICES = {
    "precision": PRECISIONS,
    "attention": ATTENTIONS,
    "checkpointing": CHECKPOINTING,
    "optimizer": OPTIMIZERS,
    "offload_optimizer": OFFLOAD,
    "offload_parameters": OFFLOAD,
    "method": METHODS,
}
_SIZES = ("seq_len", "micro_batch", "gradient_accumulation", "world_size", "reduce_bucket_elements")
_MAX_SIZE = 2**40  # a mistyped number should be an error, not a forecast


class SetupError(InputError):
    """The setup is not one that can exist. ``errors`` has one line for each problem."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """One rank's training step. Sizes count sequences, tokens, steps, ranks and elements.

    Raises :class:`SetupError` with every problem at once.
    """

    model: str
    """A name from ``python -m utils models``, or the path of a ``config.json`` or of its folder."""
    seq_len: int
    """Tokens in a sequence."""
    micro_batch: int
    """Sequences that one rank takes through one forward and backward pass."""
    gradient_accumulation: int = 1
    """Micro-batches whose gradients are added before one optimizer step."""
    world_size: int = 1
    """Ranks, one a GPU."""
    zero_stage: int | None = None
    """None: plain PyTorch. 0, 1, 2, 3: DeepSpeed."""
    offload_optimizer: str = "none"
    """Where the optimizer states are kept."""
    offload_parameters: str = "none"
    """Where the parameters are kept."""
    precision: str = "bf16"
    """bf16: parameters, gradients and states. fp32-autocast: all float32, products in bf16.
    bf16-master: bf16 with a float32 master copy, which is what DeepSpeed runs."""
    attention: str = "sdpa"
    """eager: the scores exist. sdpa: PyTorch's fused kernel. flash: the flash-attn package."""
    checkpointing: str = "none"
    """full: every layer keeps its input and recomputes the rest in the backward pass."""
    liger: bool = False
    """Liger Kernel's fused norms, rotary embedding, SwiGLU and loss."""
    optimizer: str = "adamw"
    """adamw is torch's default (foreach); -single loops over tensors, -fused is one kernel,
    -8bit is bitsandbytes'."""
    reduce_bucket_elements: int = 500_000_000
    """DeepSpeed's bucket for gradient reduction, in elements."""
    method: str = "full"
    """full, or an adapter: lora, qlora."""
    lora_rank: int | None = None
    """Rank of the adapters; only with lora and qlora."""
    lora_targets: tuple[str, ...] | None = None
    """The linear layers that get adapters; only with lora and qlora."""

    def __post_init__(self):
        errors: list[str] = []
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():  # JSON writes 5e8 as a float
                value = int(value)
                object.__setattr__(self, name, value)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
                errors.append(f"{name}: {value!r} is not allowed; a whole number from 1 up")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
                errors.append(f"{name}: {value!r} is not allowed; one of {', '.join(allowed)}{hint}")
        if isinstance(self.zero_stage, bool) or self.zero_stage not in (None, 0, 1, 2, 3):
            errors.append(f"zero_stage: {self.zero_stage!r} is not allowed; null (plain PyTorch), 0, 1, 2 or 3")
        if not isinstance(self.liger, bool):
            errors.append(f"liger: {self.liger!r} is not allowed; true or false")
        errors += self._check_adapters()
        errors += self._check_combination()
        if not isinstance(self.model, str):
            errors.append(f"model: {self.model!r} is not allowed; {_WANTED['model']}")
        else:
            try:
                object.__setattr__(self, "_architecture", get(self.model))
            except ModelError as error:
                errors += error.errors
        if errors:
            raise SetupError(*errors)

    def _check_adapters(self) -> list[str]:
        errors = []
        adapters = self.method in ("lora", "qlora")
        rank, targets = self.lora_rank, self.lora_targets
        if not adapters:
            for name, value in (("lora_rank", rank), ("lora_targets", targets)):
                if value is not None:
                    errors.append(f"{name}: {value!r} is not allowed with method {self.method!r}; lora or qlora")
            return errors
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            errors.append(f"lora_rank: {rank!r} is not allowed; a whole number from 1 up")
        if not isinstance(targets, (list, tuple)) or not targets or set(map(str, targets)) - set(LORA_TARGETS):
            errors.append(f"lora_targets: {targets!r} is not allowed; a list of {', '.join(LORA_TARGETS)}")
        else:
            object.__setattr__(self, "lora_targets", tuple(targets))
        return errors

    def _check_combination(self) -> list[str]:
        errors = []
        if self.offload_optimizer in ("cpu", "nvme") and self.zero_stage in (None, 0):
            errors.append(f"offload_optimizer: {self.offload_optimizer!r} needs DeepSpeed with zero_stage 1, 2 or 3")
        if self.offload_parameters in ("cpu", "nvme") and self.zero_stage != 3:
            errors.append(f"offload_parameters: {self.offload_parameters!r} needs DeepSpeed with zero_stage 3")
        return errors

    @property
    def architecture(self) -> Architecture:
        """The model's shape."""
        return self._architecture

    @property
    def tokens(self) -> int:
        """Tokens in one micro-batch of one rank."""
        return self.micro_batch * self.seq_len

    @property
    def warnings(self) -> list[str]:
        """What is possible and probably not meant, one line each."""
        longest = self.architecture.max_positions
        if self.seq_len > longest and not self.architecture.learned_positions:
            return [f"seq_len: {self.seq_len} is beyond the {longest} positions of {self.model}"]
        if self.seq_len > longest:
            return [
                f"seq_len: {self.seq_len} is beyond the {longest} positions of {self.model}, "
                "whose position table has no row for the rest: the model would fail"
            ]
        return []

    def beyond(self, known: dict[str, tuple], what: str) -> list[str]:
        """One line for each field whose value is not among the `known` ones; `what` says what that means."""
        return [
            f"{name}: {what} {json.dumps(getattr(self, name))}; allowed: {' or '.join(map(json.dumps, values))}"
            for name, values in known.items()
            if getattr(self, name) not in values
        ]

    @classmethod
    def from_dict(cls, values: dict) -> TrainingSetup:
        """A setup from a JSON object. Unknown and missing fields are errors, named all at once."""
        if not isinstance(values, dict):
            raise SetupError(f"setup: {values!r} is not allowed; a JSON object of fields")
        known = {field.name: field for field in fields(cls)}
        errors = [
            f"{name}: unknown field; one of {', '.join(known)}{did_you_mean(str(name), known)}"
            for name in values
            if name not in known
        ]
        missing = [name for name in ("model", "seq_len", "micro_batch") if name not in values]
        errors += [f"{name}: missing; {_WANTED[name]}" for name in missing]
        try:
            # Stand-ins for what is missing let the fields that are there be checked too.
            given = {name: value for name, value in values.items() if name in known}
            setup = cls(**{**{name: _STAND_IN[name] for name in missing}, **given})
        except SetupError as error:
            errors += error.errors
        if errors:
            raise SetupError(*errors)
        return setup

    @classmethod
    def from_json(cls, text: str) -> TrainingSetup:
        """A setup from JSON text."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise SetupError(f"setup: not JSON, line {error.lineno} column {error.colno}: {error.msg}") from None
        return cls.from_dict(values)

    def to_dict(self) -> dict:
        """Every field, in order, as JSON types."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if values["lora_targets"] is not None:
            values["lora_targets"] = list(values["lora_targets"])
        return values

    def canonical(self) -> str:
        """The setup as one line of JSON with every field and sorted keys: equal setups, equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))


_WANTED = {
    "model": "a name from `python -m utils models` or a path to a config.json",
    "seq_len": "a whole number of tokens",
    "micro_batch": "a whole number of sequences",
}
_STAND_IN = {"model": "llama-3.1-8b", "seq_len": 1, "micro_batch": 1}
