"""Counts the bytes of live tensors while PyTorch runs, on any device.

The allocator's counters exist on CUDA alone. `LiveBytes` sees every operation through PyTorch's dispatcher instead,
books the storage of each new tensor, and books it out when the storage is freed. What a kernel allocates and frees
inside (workspaces, partial sums) does not pass the dispatcher and is not counted; neither is rounding to blocks.

Watching changes one thing: under a dispatch mode autograd adds two gradients of a tensor into a new one, where it
would otherwise add in place. A float32 table that is tied, and so has two gradients, counts one copy too many at the
end of the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """A context in which `current` and `peak` follow the bytes of live tensors on one device.

    `events` lists every change as `(operation, bytes after it)`; an operation that frees is called "free". Tensors made
    before the context count if they are passed to `book`.
    """

    def __init__(self, device: str):
        super().__init__()
        self.device_type = torch.device(device).type
        self.current = 0
        self.peak = 0
        self.events: list[tuple[str, int]] = []
        self._storages: dict[int, weakref.ref] = {}

    def book(self, tensors: Iterable[torch.Tensor], name: str = "earlier") -> None:
        """Count these tensors, each storage once."""
        for tensor in tensors:
            if tensor.device.type != self.device_type:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._storages or not storage.nbytes():
                continue
            size = storage.nbytes()
            self._storages[key] = weakref.ref(storage, lambda _, key=key, size=size: self._free(key, size))
            self.current += size
            self.peak = max(self.peak, self.current)
            self.events.append((name, self.current))

    def reset_peak(self) -> None:
        """Start a new phase: the peak is what is alive now."""
        self.peak = self.current

    def _free(self, key: int, size: int) -> None:
        self._storages.pop(key, None)
        self.current -= size
        self.events.append(("free", self.current))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.book((leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)), func.overloadpacket.__name__)
        return result
