"""From a training setup to bytes: what a step of it holds, phase by phase.

The forecast is of the real thing: a transformers model trained by PyTorch, as
``utils/workers/training_step.py`` trains it, measured with ``torch.cuda.max_memory_allocated``:

    for micro_batch in batches:
        outputs = model(input_ids=ids, labels=ids, use_cache=False)   # forward
        outputs.loss.backward()                                       # backward
    optimizer.step()                                                  # step
    optimizer.zero_grad(set_to_none=True)
    del outputs

The peak of a phase is the largest of its instants, not a sum of terms. The instants come from
``utils.replay``; here they get their bytes. Nothing in an allocated byte is fitted: the sizes are the
tensors', rounded as PyTorch's allocator rounds them.

Only the standard library is imported: the command line, the notebooks and the calculator page run this
file unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

from utils.cuda_memory import (
    CONTEXT_BYTES,
    CUBLAS_WORKSPACE_BYTES,
    CUBLAS_WORKSPACES,
    CUBLASLT_WORKSPACE_BYTES,
    RESERVED_OVER_ALLOCATED,
    block_bytes,
    partial_sums,
)
from utils.layers import COMPUTE, Structure
from utils.optimizer_memory import optimizer_state_bytes, optimizer_temporary_bytes, parameter_bytes
from utils.replay import replay
from utils.setups import PLAIN_PYTORCH, SetupError, TrainingSetup

PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class _Peak:
    """The instant that decides a phase, and who owns the bytes at it."""

    instant: str
    terms: dict[str, int]

    @property
    def n_bytes(self) -> int:
        return sum(self.terms.values())


# -- Sizes -------------------------------------------------------------------------------------------


class _Sizes(dict):
    """Bytes of every ``(dims, bytes_per_element)`` of a setup, worked out when first asked for."""

    def __init__(self, setup: TrainingSetup):
        model, batch, seq = setup.architecture, setup.micro_batch, setup.seq_len
        tokens, hidden = batch * seq, model.hidden_size
        query, kv = model.query_size, model.key_value_size
        self.candidates: dict = {}  # stage -> its largest instant
        self.elements = {
            "one": 1,
            "tokens": tokens,
            "tokens*heads": tokens * model.heads,
            "tokens*kv_heads": tokens * model.kv_heads,
            "tokens*hidden": tokens * hidden,
            "3*tokens*hidden": 3 * tokens * hidden,
            "tokens*query": tokens * query,
            "tokens*query/2": tokens * query // 2,
            "tokens*kv": tokens * kv,
            "tokens*kv/2": tokens * kv // 2,
            "tokens*ffn": tokens * model.intermediate_size,
            "tokens*vocab": tokens * model.vocab_size,
            "batch*heads*seq*seq": batch * model.heads * seq * seq,
            "batch*seq*seq": batch * seq * seq,
            "seq*head_dim": seq * model.head_dim,
            "seq*hidden": seq * hidden,
            # Embedding.cu: at most min(tokens, vocabulary) rows, cut into segments of ten tokens.
            "segments*hidden": (tokens // 10 + min(tokens, model.vocab_size)) * hidden,
            "hidden": hidden,
            "3*hidden": 3 * hidden,
            "query": query,
            "kv": kv,
            "ffn": model.intermediate_size,
            "head_dim": model.head_dim,
            "hidden*hidden": hidden * hidden,
            "3*hidden*hidden": 3 * hidden * hidden,
            "hidden*query": hidden * query,
            "hidden*kv": hidden * kv,
            "hidden*ffn": hidden * model.intermediate_size,
            "hidden*vocab": hidden * model.vocab_size,
            "positions*hidden": model.max_positions * hidden,
        }

    def __missing__(self, size):
        dims, itemsize = size
        if dims.startswith("partial sums: "):
            columns, rows = dims[len("partial sums: ") :].split(" over ")
            n_bytes = partial_sums(self.elements[columns], self.elements[rows])
        else:
            n_bytes = self.elements[dims] * itemsize
        self[size] = n_bytes = block_bytes(n_bytes)
        return n_bytes

    def total(self, counts) -> int:
        # The innermost loop of a forecast: without a Python frame for each size.
        return sum(map(mul, map(self.__getitem__, counts), counts.values()))

    def peak(self, stages, itemsize: int, fixed: dict[str, int]) -> _Peak:
        """The largest instant of a phase, and its owners beside those of ``fixed``.

        What other stages have left is the same for all instants of a stage, so each stage has one candidate.
        """
        best, largest = None, -1
        for where, left, stage in stages:
            if stage not in self.candidates:
                totals = [self.total(counts) for _, counts in stage.instants]
                most = max(totals)
                self.candidates[stage] = (most, *stage.instants[totals.index(most)])
            n_bytes, name, counts = self.candidates[stage]
            n_bytes += sum(times * self.total(other) for times, other in left)
            if n_bytes > largest:
                largest, best = n_bytes, (f"{where}: {name}", (*left, (1, counts)))
        instant, alive = best
        terms = dict(fixed)
        for times, counts in alive:
            for size, count in counts.items():
                owner = _owner(size, itemsize)
                terms[owner] = terms.get(owner, 0) + times * count * self[size]
        return _Peak(instant, terms)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes of one rank. Every field is an ``int`` but the names.

    ``terms`` are the owners of the peak: they add up to ``peak_bytes``, at the instant that decides.
    """

    parameters: int
    """Parameters of the model, a number."""
    terms: dict[str, int]
    phases: dict[str, int]
    """Peak of forward, backward and step."""
    peak_phase: str
    peak_bytes: int
    """What ``torch.cuda.max_memory_allocated`` will say."""
    instant: str
    """The allocation at which the peak is reached."""
    held_bytes: int
    """Allocated between steps."""
    reserved_bytes: int
    """Taken from the driver by the caching allocator."""
    device_bytes: int
    """Taken on the device by the process, its CUDA context included."""
    host_bytes: int
    """Kept in host memory by offloading."""

    def to_dict(self) -> dict:
        """As JSON types."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def forecast(setup: TrainingSetup) -> Forecast:
    """Forecast a training step. Raises SetupError for a setup that is not modelled yet."""
    _check_modelled(setup)
    model = setup.architecture
    itemsize = 4 if setup.precision == "fp32-autocast" else 2
    sizes = _Sizes(setup)
    accumulating = setup.gradient_accumulation > 1
    step = replay(_structure(setup, itemsize), setup.checkpointing == "full", accumulating)

    biased = model.qkv_bias or model.output_bias or model.mlp_bias
    held = {
        "parameters": parameter_bytes(model, itemsize),
        "optimizer_states": optimizer_state_bytes(model, setup.optimizer, itemsize),
        "matmul_workspaces": CUBLAS_WORKSPACES * CUBLAS_WORKSPACE_BYTES + biased * CUBLASLT_WORKSPACE_BYTES,
        "inputs": block_bytes(8 * setup.tokens),
    }
    # The gradients of an earlier micro-step, and its outputs until the next ones replace them.
    earlier = {"gradients": parameter_bytes(model, itemsize)} if accumulating else {}
    outputs = {"logits_and_loss": sizes["tokens*vocab", COMPUTE]}
    tables = {} if model.learned_positions else {"activations": 2 * sizes["seq*head_dim", itemsize]}

    peaks = {
        "forward": sizes.peak(
            _forward_stages(step, model.layers), itemsize, _add(held, earlier, tables, outputs if accumulating else {})
        ),
        "backward": sizes.peak(_backward_stages(step, model.layers), itemsize, _add(held, earlier, tables)),
        "step": _Peak(
            "step: update of the parameters",
            _add(
                held,
                outputs,
                {
                    "gradients": parameter_bytes(model, itemsize),
                    "optimizer_temporaries": optimizer_temporary_bytes(model, setup.optimizer, itemsize),
                },
            ),
        ),
    }
    phases = {phase: peaks[phase].n_bytes for phase in PHASES}
    peak_phase = max(PHASES, key=phases.__getitem__)
    peak = peaks[peak_phase]
    reserved = round(peak.n_bytes * RESERVED_OVER_ALLOCATED)
    return Forecast(
        parameters=model.parameters,
        terms={name: n_bytes for name, n_bytes in peak.terms.items() if n_bytes},
        phases=phases,
        peak_phase=peak_phase,
        peak_bytes=peak.n_bytes,
        instant=peak.instant,
        held_bytes=sum(held.values()),
        reserved_bytes=reserved,
        device_bytes=reserved + CONTEXT_BYTES,
        host_bytes=0,
    )


def _forward_stages(step, layers):
    """``(where, what other stages have left as (how often, counts), this stage)``."""
    for finished in (0, layers - 1):
        left = ((finished, step.layer_forward.leaves), (finished, step.autocast_copies), (1, step.kept))
        yield f"forward, layer {finished + 1}", left, step.layer_forward
    left = ((layers, step.layer_forward.leaves), (layers, step.autocast_copies))
    yield "forward", (*left, (1, step.kept)), step.final_norm
    yield "forward, head", (*left, (1, step.kept_for_backward)), step.head_forward


def _backward_stages(step, layers):
    left = ((layers, step.layer_forward.leaves), (1, step.kept_for_backward))
    yield "backward, head", left, step.head_backward
    for below in (layers - 1, 0):
        left = (
            (1, step.head_backward.leaves),
            (1, step.kept_for_backward),
            (below, step.layer_forward.leaves),
            (layers - 1 - below, step.layer_backward.leaves),
        )
        yield f"backward, layer {below + 1}", left, step.layer_backward
    left = ((1, step.before_embed_backward), (layers, step.layer_backward.leaves))
    yield "backward, embedding", left, step.embed_backward


def _add(*parts):
    """Sum of dictionaries, key by key."""
    total: dict = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return total


def _owner(size, itemsize):
    """The term that a tensor of this size belongs to."""
    dims, width = size
    if "vocab" in dims and "tokens" in dims:
        return "logits_and_loss"
    if "tokens" in dims or "seq" in dims or "partial" in dims or "segments" in dims or dims == "one":
        return "activations"
    return "gradients" if width == itemsize else "autocast_copies"


def _structure(setup: TrainingSetup, itemsize: int) -> Structure:
    model = setup.architecture
    return Structure(
        gpt2=model.family == "gpt2",
        attention=setup.attention,
        stream=itemsize,
        grouped=model.kv_heads < model.heads,
        one_key_head=model.kv_heads == 1,
        one_sequence=setup.micro_batch == 1,
        qkv_bias=model.qkv_bias,
        output_bias=model.output_bias,
        mlp_bias=model.mlp_bias,
        qk_norm=model.qk_norm,
        attention_dropout=model.attention_dropout > 0,
        residual_dropout=model.residual_dropout > 0,
        embedding_dropout=model.embedding_dropout > 0,
        tied=model.tied_embeddings,
    )


def _check_modelled(setup: TrainingSetup):
    errors = setup.beyond(PLAIN_PYTORCH, "no forecast yet for")
    window = setup.architecture.sliding_window
    if setup.attention == "sdpa" and window is not None and setup.seq_len >= window:
        # transformers then passes a mask, and another kernel runs on repeated keys and values.
        errors.append(
            f"seq_len: no forecast yet for {setup.seq_len} with sdpa where the sliding window of {setup.model} counts; "
            f"below {window}, or attention 'eager'"
        )
    if setup.attention == "sdpa" and setup.architecture.head_dim > 256:
        errors.append(
            f"model: no forecast yet for {setup.model} with sdpa, with heads of {setup.architecture.head_dim}: "
            "no fused kernel takes them; up to 256, or attention 'eager'"
        )
    if errors:
        raise SetupError(*errors)
