"""Bytes of everything that is shaped like the parameters: gradients, optimizer states, temporaries of the step.

Only the standard library is imported.
"""

from __future__ import annotations

import math
from functools import lru_cache

from utils.cuda_memory import block_bytes, packed_bytes
from utils.models import Architecture


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
