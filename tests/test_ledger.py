"""The ledger frees what PyTorch frees, when PyTorch frees it."""

from __future__ import annotations

import pytest

from utils.ledger import Ledger, Node, Parameter


def leaf(ledger, size=("x", 2)):
    tensor = ledger.new(*size, "leaf")
    tensor.node = Node(None, (), (), None)
    return tensor


def copy_of(ledger, x, name, saved=(), relayout=None):
    out = ledger.new(*x.size, name)

    def backward(gradient):
        return [ledger.new(*x.size, name + " (backward)")]

    return ledger.record(out, [x], ledger.save(*saved), backward, relayout)


def test_a_tensor_lives_until_its_last_owner_lets_go():
    ledger = Ledger()
    x = ledger.new("x", 2, "made")
    ledger.keep(x)
    ledger.drop(x)
    assert ledger.snapshot() == {("x", 2): 1}
    ledger.drop(x)
    assert ledger.snapshot() == {}
    with pytest.raises(AssertionError, match="released twice"):
        ledger.drop(x)


def test_a_view_keeps_its_base_alive_and_allocates_nothing():
    ledger = Ledger()
    base = ledger.new("x", 2, "base")
    view = ledger.view(base, "half of x")
    ledger.drop(base)
    assert ledger.snapshot() == {("x", 2): 1} and len(ledger.instants) == 1
    ledger.drop(view)
    assert ledger.snapshot() == {}


def test_saved_tensors_go_with_their_node():
    ledger = Ledger()
    x = leaf(ledger)
    y = copy_of(ledger, x, "y", saved=[x])
    ledger.drop(x, y)
    assert ledger.snapshot() == {("x", 2): 1}  # x, which the node has saved
    ledger.backward(y, ledger.new("x", 2, "gradient"))
    assert ledger.snapshot() == {("x", 2): 1}  # the gradient of x
    assert ledger.instants[-1] == ("y (backward)", {("x", 2): 3})  # saved x, incoming and outgoing gradient


def test_nothing_is_saved_without_recording():
    ledger = Ledger(recording=False)
    x = leaf(ledger)
    y = copy_of(ledger, x, "y", saved=[x])
    ledger.drop(x, y)
    assert ledger.snapshot() == {} and not ledger.nodes


@pytest.mark.parametrize("is_view", [False, True], ids=["fresh", "view"])
def test_two_gradients_are_added_in_place_unless_the_first_is_a_view(is_view):
    ledger = Ledger()
    x = leaf(ledger)
    first, second = ledger.new("x", 2, "first"), ledger.new("x", 2, "second")
    first.is_view = is_view
    ledger.deliver(x, first)
    ledger.deliver(x, second)
    ledger.drop(x)
    assert ledger.snapshot() == {("x", 2): 1}
    assert (ledger.instants[-1][0] == "sum of two gradients") == is_view


def test_a_shared_gradient_is_not_added_into():
    ledger = Ledger()
    x = leaf(ledger)
    shared = ledger.new("x", 2, "shared")
    ledger.deliver(x, ledger.keep(shared))
    ledger.deliver(x, ledger.new("x", 2, "other"))
    assert ledger.instants[-1] == ("sum of two gradients", {("x", 2): 4})


@pytest.mark.parametrize(("accumulating", "left"), [(False, {("w", 2): 1}), (True, {})])
def test_a_weight_gradient_stays_or_is_added_to_the_one_that_is_there(accumulating, left):
    ledger = Ledger(accumulating=accumulating)
    ledger.deliver(Parameter("w"), ledger.new("w", 2, "gradient"))
    assert ledger.snapshot() == left


def test_a_tied_weight_waits_for_both_gradients():
    ledger = Ledger(accumulating=True)
    weight = Parameter("w", uses=2)
    ledger.deliver(weight, ledger.new("w", 2, "from the head"))
    assert ledger.snapshot() == {("w", 2): 1}
    ledger.deliver(weight, ledger.new("w", 2, "from the embedding"))
    assert ledger.snapshot() == {}


def test_a_gradient_in_another_layout_is_copied_before_the_node_runs():
    ledger = Ledger()
    x = leaf(ledger)
    y = copy_of(ledger, x, "y", relayout="back to rows")
    ledger.drop(x, y)
    ledger.instants.clear()
    ledger.backward(y, ledger.new("x", 2, "gradient"))
    assert [name for name, _ in ledger.instants] == ["gradient", "back to rows", "y (backward)"]
    assert max(counts["x", 2] for _, counts in ledger.instants) == 2


def test_a_recomputation_stops_with_its_last_saved_tensor():
    ledger = Ledger()
    x = leaf(ledger)
    ledger.saves_wanted = 1
    y = copy_of(ledger, x, "y", saved=[x])
    z = copy_of(ledger, y, "z")
    assert [name for name, _ in ledger.instants] == ["leaf", "y"]  # z did not run
    ledger.saves_wanted = None
    ledger.drop(y, z)
    ledger.backward(z, ledger.new("x", 2, "gradient"))
    assert ledger.snapshot() == {("x", 2): 2}  # x, held by the caller, and its gradient


def test_autocast_keeps_its_copies_until_its_context_ends():
    ledger = Ledger(recording=False)
    copy = ledger.new("w", 2, "autocast copy")
    ledger.cache(copy)
    ledger.drop(copy)
    assert ledger.snapshot() == {("w", 2): 1}
    ledger.end_autocast()
    assert ledger.snapshot() == {}
