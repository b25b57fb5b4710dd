"""A ledger of tensors: which ones are alive at each instant of a forward and a backward pass.

The forecast does not run a model. It *replays* the model's code on sizes alone: every operation
allocates the tensors that PyTorch allocates, saves the ones that autograd saves, and frees each tensor
when its last owner lets go. The backward pass then happens the way PyTorch's engine does it: nodes in
reverse order of creation, saved tensors released after their node, gradients that meet at one tensor
added, in place where the engine may and into a new tensor where it may not.

Sizes stay symbolic, ``("tokens*hidden", 2)`` for two bytes an element, so one replay serves every model
of the same structure: an instant is a count for each size, and its bytes are a dot product.

Sources: torch/csrc/autograd/engine.cpp (order, release), input_buffer.cpp (``accumulate``),
functions/accumulate_grad.h (a first gradient is kept, not copied), torch/utils/checkpoint.py
(non-reentrant recomputation with early stop).
"""

from __future__ import annotations


class Tensor:
    """One allocation. ``size`` is ``(dims, bytes_per_element)``; ``owners`` counts who keeps it alive."""

    __slots__ = ("size", "base", "owners", "node", "is_view", "phantom")

    def __init__(self, size, base=None):
        self.size = size
        self.base = base  # the tensor whose memory a view shares
        self.owners = 1
        self.phantom = False  # of an operation that did not run
        self.node = None
        # The engine adds into a gradient only if nobody shares its storage. A gradient that comes out
        # of a matrix product has been reshaped, so it is a view and is never added into.
        self.is_view = False


class Node:
    """One recorded operation: what it saved, where its input gradients go, how it makes them."""

    __slots__ = ("backward", "saved", "inputs", "relayout", "gradient")

    def __init__(self, backward, saved, inputs, relayout):
        self.backward = backward
        self.saved = saved
        self.inputs = inputs
        self.relayout = relayout
        self.gradient = None


class Parameter:
    """A weight. Its gradient stays after the backward pass.

    ``uses`` is how many operations read the weight: a tied embedding is read twice, and its two
    gradients are added only when both are there.
    """

    __slots__ = ("dims", "uses", "arrived", "gradient")

    def __init__(self, dims, uses=1):
        self.dims = dims
        self.uses = uses
        self.arrived = 0
        self.gradient = None


class Ledger:
    """Records allocations, and after each one the instant: a name and the count of every size alive.

    ``recording`` is whether autograd saves tensors (false inside a checkpointed forward pass).
    ``accumulating`` is whether every weight already has a gradient from an earlier micro-step: a new
    gradient is then added into it and dropped.
    """

    def __init__(self, recording=True, accumulating=False):
        self.recording = recording
        self.accumulating = accumulating
        self.alive = {}
        self.instants = []
        self.nodes = []
        self.cached = []
        self.saves = 0
        self.saves_wanted = None

    # -- tensors ---------------------------------------------------------------------------------

    def new(self, dims, itemsize, name):
        """Allocate a tensor, owned by the code that asked for it."""
        tensor = Tensor((dims, itemsize))
        if self.saves == self.saves_wanted:
            # The recomputation has stopped: nothing runs any more.
            tensor.phantom = True
            return tensor
        self.alive[tensor.size] = self.alive.get(tensor.size, 0) + 1
        self.instants.append((name, dict(self.alive)))
        return tensor

    def view(self, base, dims):
        """Another tensor on ``base``'s memory: it allocates nothing and keeps the base alive."""
        return Tensor((dims, base.size[1]), self.keep(base))

    def keep(self, tensor):
        """One more owner."""
        tensor.owners += 1
        return tensor

    def drop(self, *tensors):
        """A Python variable goes out of scope, or an owner lets go."""
        for tensor in tensors:
            tensor.owners -= 1
            if tensor.owners < 0:
                raise AssertionError(f"tensor {tensor.size} released twice")
            if tensor.owners or tensor.phantom:
                continue
            if tensor.base is None:
                self.alive[tensor.size] -= 1
            else:
                self.drop(tensor.base)

    def copy(self, tensor, name):
        """The tensor in another memory layout; the old one goes."""
        fresh = self.new(*tensor.size, name)
        self.drop(tensor)
        return fresh

    def snapshot(self):
        """The sizes alive now, without the zeros."""
        return {size: count for size, count in self.alive.items() if count}

    # -- forward ---------------------------------------------------------------------------------

    def save(self, *tensors):
        """Autograd saves tensors: before an operation runs its inputs, after it its outputs.

        A recomputation ends with the last save (early stop in torch/utils/checkpoint.py), so an
        operation whose inputs are that last save does not run.
        """
        if not self.recording:
            return ()
        for tensor in tensors:
            self.keep(tensor)
        self.saves += len(tensors)
        return tensors

    def record(self, output, inputs, saved, backward, relayout=None):
        """Record an operation: ``backward(gradient)`` returns one gradient (or None) an input.

        ``saved`` is what :meth:`save` returned.

        ``relayout`` names the copy that the gradient needs first, because it arrives in another
        memory layout than the operation works on (heads before tokens, say).
        """
        if self.recording:
            output.node = Node(backward, saved, inputs, relayout)
            self.nodes.append(output.node)
        return output

    def cache(self, tensor):
        """Autocast keeps a cast weight until its context ends (ATen/autocast_mode.cpp)."""
        self.cached.append(self.keep(tensor))

    def end_autocast(self):
        """The autocast context ends: its cache of cast weights is cleared."""
        self.drop(*self.cached)
        self.cached = []

    # -- backward --------------------------------------------------------------------------------

    def deliver(self, target, gradient):
        """Hand ``gradient`` to the node of a tensor, or to a parameter."""
        if gradient is None:
            return
        if isinstance(target, Parameter):
            self._accumulate_parameter(target, gradient)
            return
        node = target.node
        if node is None:  # the input needs no gradient
            self.drop(gradient)
            return
        node.gradient = self._add(node.gradient, gradient)

    def _add(self, held, gradient):
        if held is None:
            return gradient
        if held.owners == 1 and not held.is_view:
            self.drop(gradient)
            return held
        total = self.new(*held.size, "sum of two gradients")
        self.drop(held)
        self.drop(gradient)
        return total

    def _accumulate_parameter(self, parameter, gradient):
        parameter.arrived += 1
        parameter.gradient = self._add(parameter.gradient, gradient)
        if parameter.arrived < parameter.uses:
            return
        if self.accumulating:
            self.drop(parameter.gradient)
            parameter.gradient = None

    def backward(self, output, gradient):
        """Run every recorded node, last one first, starting from ``gradient`` at ``output``."""
        self.deliver(output, gradient)
        while self.nodes:
            node = self.nodes.pop()
            received, node.gradient = node.gradient, None
            if received is None:
                raise AssertionError("a recorded operation received no gradient")
            if node.relayout:
                received = self.copy(received, node.relayout)
            produced = node.backward(received)
            # A gradient that is passed on unchanged has been kept by the node.
            self.drop(*node.saved, received)
            for target, made in zip(node.inputs, produced, strict=True):
                self.deliver(target, made)
