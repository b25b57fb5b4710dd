"""utils.units: one spelling for every quantity."""

import doctest

from utils import units


def test_doctests():
    results = doctest.testmod(units)
    assert results.attempted > 0
    assert results.failed == 0


def test_the_same_bytes_in_both_units():
    bf16_bytes = 2 * 8_030_261_248  # Llama-3.1-8B
    assert units.gib(bf16_bytes) == "14.96 GiB"
    assert units.gb(bf16_bytes) == "16.06 GB"


def test_a_difference_may_be_negative():
    assert units.gib(-units.GIB) == "-1.00 GiB"


def test_digits():
    assert units.gib(3 * units.GIB, digits=0) == "3 GiB"
    assert units.signed_percent(0.12345, digits=2) == "+12.35 %"


def test_no_difference_has_one_spelling():
    assert {units.signed_percent(x) for x in (0, 0.0, -0.0, -0.0001, 0.0001)} == {"+0.0 %"}
