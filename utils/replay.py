"""Replays one training step of a model on a ledger, once for each structure.

A model is an embedding, L equal layers and a head. Replaying one layer is enough: at layer i of the
forward pass i layers have left their saved tensors behind; at layer i of the backward pass the layers
above have left their weight gradients instead. Memory is linear in i, so its largest value is at the
first layer or at the last, and every instant of the step is one of

    forward, layer i   i x saved + (layer's instant)
    head               L x saved + (head's instant)
    backward, layer i  i x saved + (L-1-i) x layer gradients + head gradients + (layer's instant)
    embedding          all gradients + (its instant)

with i = 0 or L-1. An instant that another one dominates in every size can never be the peak, so it is
left out here, once for all models of the structure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from utils import layers
from utils.ledger import Ledger, Node, Parameter


@dataclass(frozen=True, eq=False)  # compared and hashed as the object it is
class Stage:
    """One stage of the step: its undominated instants ``(name, {size: count})`` and what it leaves."""

    instants: tuple
    leaves: dict


@dataclass(frozen=True)
class Step:
    """The stages of a step. Every instant of a stage counts the stage's own inputs too."""

    kept: dict  # alive from the embedding to the logits: inputs_embeds, the causal mask
    kept_for_backward: dict  # of these, what recomputation needs as an argument: the causal mask
    autocast_copies: dict  # cast weights of one layer that only autocast's cache keeps
    layer_forward: Stage  # leaves: the saved tensors of one layer
    final_norm: Stage  # leaves: nothing that the head's stage does not count
    head_forward: Stage  # leaves: the logits and what the head's backward pass needs
    head_backward: Stage  # leaves: the logits and the gradients of the head's weights
    layer_backward: Stage  # leaves: the gradients of one layer's weights
    embed_backward: Stage
    before_embed_backward: dict  # what the head left, less a tied table's gradient, which is in the stage


@cache
def replay(structure, checkpointed, accumulating):
    """Replay a step of ``structure``. ``checkpointed``: every layer recomputes its activations.
    ``accumulating``: the weights have gradients already (a later micro-step)."""
    layer_forward, autocast_copies, saves_input = _layer_forward(structure, checkpointed)
    final_norm, head_forward, head_backward = _head(structure, accumulating)
    return Step(
        kept=_kept(structure, saves_input),
        kept_for_backward=(
            {("batch*seq*seq", structure.stream): 1} if checkpointed and structure.attention == "eager" else {}
        ),
        autocast_copies=autocast_copies,
        layer_forward=layer_forward,
        final_norm=final_norm,
        head_forward=head_forward,
        head_backward=head_backward,
        layer_backward=_layer_backward(structure, checkpointed, accumulating),
        embed_backward=_embed_backward(structure, accumulating),
        before_embed_backward=_minus(
            head_backward.leaves, *([("hidden*vocab", structure.stream)] if structure.tied else [])
        ),
    )


def undominated(instants):
    """The instants that some assignment of dimensions could make the largest (no other covers them).

    Two bytes an element and four are compared with each other; blocks of 512 bytes are not seen here.
    """
    kept = []
    for name, counts in instants:
        weights = _bytes_by_dims(counts)
        if any(_covers(other, weights) for _, _, other in kept):
            continue
        kept = [one for one in kept if not _covers(weights, one[2])]
        kept.append((name, {size: count for size, count in counts.items() if count}, weights))
    return tuple((name, counts) for name, counts, _ in kept)


def _bytes_by_dims(counts):
    weights = {}
    for (dims, itemsize), count in counts.items():
        weights[dims] = weights.get(dims, 0) + itemsize * count
    return weights


def _covers(larger, smaller):
    return all(larger.get(dims, 0) >= weight for dims, weight in smaller.items())


def _minus(counts, *sizes):
    """``counts`` with one tensor of each of ``sizes`` taken out."""
    left = dict(counts)
    for size in sizes:
        left[size] = left.get(size, 0) - 1
    return {size: count for size, count in left.items() if count}


def _hidden(s):
    return (s.tokens_hidden, s.stream)


def _input(ledger, s):
    """A hidden state whose gradient is wanted, and which some caller's variable holds."""
    x = ledger.new(*_hidden(s), "hidden state")
    x.node = Node(None, (), (), None)
    return x


def _kept(s, saves_input):
    ledger = Ledger()
    ledger.drop(layers.embed(ledger, s))
    if saves_input and not s.gpt2:
        # The first layer saves its input, which is inputs_embeds itself: count it there.
        return _minus(ledger.snapshot(), _hidden(s))
    return ledger.snapshot()


def _layer_forward(s, checkpointed):
    ledger = Ledger(recording=not checkpointed)
    x = _input(ledger, s)
    if checkpointed:
        ledger.keep(x)  # torch.utils.checkpoint keeps the arguments of the layer
    out = layers.decoder_layer(ledger, s, x)
    ledger.drop(x)
    in_context = _minus(ledger.snapshot(), _hidden(s))  # the output is the next layer's input
    ledger.end_autocast()
    ledger.drop(out)
    leaves = ledger.snapshot()
    copies = {size: count - leaves.get(size, 0) for size, count in in_context.items()}
    copies = {size: count for size, count in copies.items() if count}
    return Stage(undominated(ledger.instants), leaves), copies, x.owners > 0


def _layer_backward(s, checkpointed, accumulating):
    ledger = Ledger(accumulating=accumulating)
    x = _input(ledger, s)
    if checkpointed:
        counting = Ledger()
        layers.decoder_layer(counting, s, _input(counting, s))
        gradient = ledger.new(*_hidden(s), "gradient of the layer's output")
        ledger.instants.clear()
        ledger.saves_wanted = counting.saves
    out = layers.decoder_layer(ledger, s, x)
    ledger.saves_wanted = None
    ledger.end_autocast()
    ledger.drop(out)
    if not checkpointed:
        ledger.drop(x)
        ledger.instants.clear()
        gradient = ledger.new(*_hidden(s), "gradient of the layer's output")
    ledger.backward(out, gradient)
    if checkpointed:
        ledger.drop(x)  # kept by the checkpoint's frame, which goes with the layer's last saved tensor
    return Stage(undominated(ledger.instants), _minus(ledger.snapshot(), _hidden(s)))


def _head_weight(s):
    return Parameter("hidden*vocab", uses=2 if s.tied else 1)


def _head(s, accumulating):
    ledger = Ledger(accumulating=accumulating)
    x = _input(ledger, s)
    normed = layers.final_norm(ledger, s, x)
    ledger.drop(x)
    final_norm = Stage(undominated(ledger.instants), {})
    ledger.instants.clear()
    log_probabilities = layers.head(ledger, s, normed, _head_weight(s))
    ledger.end_autocast()
    forward = Stage(undominated(ledger.instants), ledger.snapshot())
    ledger.instants.clear()
    ledger.backward(log_probabilities, ledger.new("one", 4, "gradient of the loss"))
    return final_norm, forward, Stage(undominated(ledger.instants), _minus(ledger.snapshot(), _hidden(s)))


def _embed_backward(s, accumulating):
    ledger = Ledger(accumulating=accumulating)
    table, positions = _head_weight(s), Parameter("positions*hidden")
    if s.tied:
        from_head = ledger.new(table.dims, s.stream, "table gradient from the head")
        from_head.is_view = s.stream == layers.COMPUTE
        ledger.deliver(table, from_head)
    gradient = ledger.new(*_hidden(s), "gradient of the embeddings")
    ledger.instants.clear()
    layers.embedding_backward(ledger, s, gradient, table, positions)
    return Stage(undominated(ledger.instants), ledger.snapshot())
