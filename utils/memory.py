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
``utils.replay``; here they get their bytes. Nothing is fitted: the sizes are the tensors', rounded as
PyTorch's allocator rounds them.

Only the standard library is imported: the command line, the notebooks and the calculator page run this
file unchanged.
"""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import dataclass
from functools import lru_cache

from utils.layers import COMPUTE, Structure
from utils.models import Architecture
from utils.replay import replay
from utils.setups import SetupError, TrainingSetup
from utils.units import MIB

PHASES = ("forward", "backward", "step")

# -- What surrounds the tensors ----------------------------------------------------------------------

# cuBLAS takes one workspace for each thread that multiplies matrices, through PyTorch's allocator: the
# main thread and autograd's. 32 MiB on Hopper and newer, 8.125 MiB before
# (aten/src/ATen/cuda/CUDABlas.cpp, CublasHandlePool.cpp: getChosenWorkspaceSize).
CUBLAS_WORKSPACES = 2
CUBLAS_WORKSPACE_BYTES = 32 * MIB
# A product with a bias goes through cuBLASLt, which has a workspace of its own (CUDABlas.cpp).
CUBLASLT_WORKSPACE_BYTES = 1 * MIB

# Around the allocator, both measured and held to the records by a test. The allocator keeps blocks that no
# tensor fits any more: reserved over allocated, the median of all recorded steps (they span 1.00 to 1.33).
RESERVED_OVER_ALLOCATED = 1.065
# The CUDA context and the loaded kernels: device-level less reserved, the same in every recorded step to 16 MiB.
CONTEXT_BYTES = 758 * MIB

# Reductions over many rows split the rows until the GPU is full: 132 multiprocessors of 2,048 threads
# on an H100 or H200. Another GPU changes this buffer by its share of them.
MULTIPROCESSORS = 132
THREADS_PER_MULTIPROCESSOR = 2048


def block_bytes(requested: int) -> int:
    """What PyTorch's caching allocator counts for a request: whole blocks of 512 bytes
    (c10/cuda/CUDACachingAllocator.cpp, round_size).

    >>> block_bytes(1), block_bytes(1024)
    (512, 1024)
    """
    return -(-requested // 512) * 512


def packed_bytes(requests) -> int:
    """What the allocator counts for requests that it serves one after another from an empty cache.

    Small requests (up to 1 MiB) share segments of 2 MiB, larger ones segments of 20 MiB, and from 10 MiB on
    each opens a segment of whole 2 MiB. A request takes the smallest free block that holds it; the rest of the
    block is split off, unless it is too small to be worth it (in the large pool up to 1 MiB): then it is counted
    with the tensor (get_allocation_size, get_free_block, should_split).

    >>> packed_bytes([11 * MIB]) // MIB, packed_bytes([21 * MIB // 2]) / MIB, packed_bytes(4 * [6 * MIB]) / MIB
    (12, 10.5, 24.0)
    """
    free: dict[bool, list[int]] = {True: [], False: []}  # by pool, small or large; sorted
    total = 0
    for requested in requests:
        size = block_bytes(requested)
        small = size <= MIB
        blocks = free[small]
        position = bisect.bisect_left(blocks, size)
        if position < len(blocks):
            block = blocks.pop(position)
        elif small:
            block = 2 * MIB
        else:
            block = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        rest = block - size
        if rest >= 512 if small else rest > MIB:
            bisect.insort(blocks, rest)
            block = size
        total += block
    return total


def partial_sums(columns: int, rows: int) -> int:
    """Bytes of the buffer in which a sum over ``rows`` of a ``[rows, columns]`` matrix meets.

    Zero where each thread block sums whole columns. The launch geometry of
    aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, global_memory_size): four columns a thread,
    128 threads a block, at least 16 and at most 256 rows a thread.

    >>> partial_sums(2048, 4096) // 2**20, partial_sums(4096, 512)
    (64, 0)
    """
    vector, threads = 4, 128
    if columns % vector:
        vector, threads = 1, 512
    across = _power_of_two(columns // vector, threads)
    width = min(across, 32)
    height = min(_power_of_two(rows, threads), threads // width)
    width = min(across, threads // height)
    rows_per_thread = -(-rows // height)
    blocks = -(-columns // (vector * width))
    full = MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR // (width * height))
    if rows_per_thread < 256 or blocks > full:
        return 0
    split = max(min(-(-full // blocks), -(-rows_per_thread // 16)), -(-rows_per_thread // 256))
    if split == 1:
        return 0
    return 4 * columns * split * width * vector


def _power_of_two(number: int, at_most: int) -> int:
    return 1 << (max(1, min(number, at_most)).bit_length() - 1)


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
        return sum(self[size] * count for size, count in counts.items())

    def peak(self, stages, itemsize: int, fixed: dict[str, int]) -> _Peak:
        """The largest instant of a phase, and its owners beside those of ``fixed``."""
        best, largest = None, -1
        for where, left, instants in stages:
            base = sum(times * self.total(counts) for times, counts in left)
            for name, counts in instants:
                n_bytes = base + self.total(counts)
                if n_bytes > largest:
                    largest, best = n_bytes, (f"{where}: {name}", (*left, (1, counts)))
        instant, alive = best
        terms = dict(fixed)
        for times, counts in alive:
            for size, count in counts.items():
                owner = _owner(size, itemsize)
                terms[owner] = terms.get(owner, 0) + times * count * self[size]
        return _Peak(instant, terms)


@lru_cache(maxsize=1024)
def _elements(model: Architecture) -> tuple[int, ...]:
    """Elements of every parameter, in the order in which the model makes them."""
    return tuple(math.prod(shape) for _, shape in model.tensors())


@lru_cache(maxsize=1024)
def parameter_bytes(model: Architecture, itemsize: int) -> int:
    """Bytes of one tensor like each parameter: of the parameters, the gradients, or one optimizer state.

    Each of these sets is made for the first time in a row, mostly from fresh segments, and its blocks keep
    their sizes from then on.
    """
    return packed_bytes(itemsize * elements for elements in _elements(model))


# -- Optimizers --------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def optimizer_state_bytes(model: Architecture, optimizer: str, itemsize: int) -> int:
    """Bytes that the optimizer holds between steps.

    AdamW: two tensors like the parameter (torch/optim/adamw.py), and for the fused kernel a step counter on the
    device. 8-bit AdamW: one byte a state, one float32 maximum a state and block of 256, two tables of 256
    float32; a parameter under 4,096 elements keeps float32 states (bitsandbytes/optim/optimizer.py,
    Optimizer2State.init_state). SGD without momentum: nothing.
    """
    requests: list[int] = []
    for elements in _elements(model):
        if optimizer == "adamw-8bit" and elements < 4096:
            requests += 2 * [4 * elements]
        elif optimizer == "adamw-8bit":
            requests += 2 * [elements] + 2 * [4 * -(-elements // 256)]
        elif optimizer != "sgd":
            requests += 2 * [itemsize * elements] + [4] * (optimizer == "adamw-fused")
    if optimizer == "adamw-8bit":
        requests += 2 * [4 * 256]
    return packed_bytes(requests)


def optimizer_temporary_bytes(model: Architecture, optimizer: str, itemsize: int) -> int:
    """The most that a step of the optimizer allocates on top of parameters, gradients and states.

    foreach AdamW takes the square roots of all second moments at once (torch/optim/adam.py,
    ``_multi_tensor_adam``: ``_foreach_sqrt``); the loop holds a root and its quotient for one parameter at a
    time (``_single_tensor_adam``: ``(exp_avg_sq.sqrt() / bias_correction2_sqrt)``); the fused and the 8-bit
    kernels work in place, and so does foreach SGD.
    """
    if optimizer == "adamw":
        return parameter_bytes(model, itemsize)
    if optimizer == "adamw-single":
        return 2 * block_bytes(itemsize * max(_elements(model)))
    return 0


# -- The forecast ------------------------------------------------------------------------------------


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
    """``(where, what other stages have left as (how often, counts), this stage's instants)``."""
    for finished in (0, layers - 1):
        left = ((finished, step.layer_forward.leaves), (finished, step.autocast_copies), (1, step.kept))
        yield f"forward, layer {finished + 1}", left, step.layer_forward.instants
    left = ((layers, step.layer_forward.leaves), (layers, step.autocast_copies), (1, step.kept_for_backward))
    yield "forward, head", left, step.head_forward.instants


def _backward_stages(step, layers):
    left = ((layers, step.layer_forward.leaves), (1, step.kept_for_backward))
    yield "backward, head", left, step.head_backward.instants
    for below in (layers - 1, 0):
        left = (
            (1, step.head_backward.leaves),
            (1, step.kept_for_backward),
            (below, step.layer_forward.leaves),
            (layers - 1 - below, step.layer_backward.leaves),
        )
        yield f"backward, layer {below + 1}", left, step.layer_backward.instants
    left = ((1, step.before_embed_backward), (layers, step.layer_backward.leaves))
    yield "backward, embedding", left, step.embed_backward.instants


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


# Fields of a setup whose other values arrive with their chapters.
_MODELLED = {
    "world_size": (1,),
    "zero_stage": (None,),
    "precision": ("bf16", "fp32-autocast"),
    "attention": ("eager", "sdpa"),
    "liger": (False,),
    "method": ("full",),
}


def _check_modelled(setup: TrainingSetup):
    errors = [
        f"{name}: no forecast yet for {json.dumps(getattr(setup, name))}; {' or '.join(map(json.dumps, allowed))}"
        for name, allowed in _MODELLED.items()
        if getattr(setup, name) not in allowed
    ]
    window = setup.architecture.sliding_window
    if setup.attention == "sdpa" and window is not None and setup.seq_len > window:
        errors.append(
            f"seq_len: no forecast yet for {setup.seq_len} with sdpa beyond the sliding window of {setup.model}; "
            f"up to {window}, or attention 'eager'"
        )
    if errors:
        raise SetupError(*errors)
