"""Perplexities of mean losses, of models that have diverged too."""

import math

import pytest

from smlp.evaluation.perplexity import of_bits, of_nats


def test_of_ordinary_losses():
    assert of_bits(3.0) == 8.0
    assert of_nats(math.log(20.0)) == pytest.approx(20.0)
    assert of_bits(math.log2(math.e) * 4.5) == pytest.approx(of_nats(4.5))


@pytest.mark.parametrize("bits", [1000.1, 1023.5, 1024.0, 1e6, math.inf])
def test_of_losses_that_no_float_could_hold(bits):
    assert of_bits(bits) == of_nats(bits * math.log(2)) == math.inf


def test_finite_ones_can_be_added_up():
    largest = of_bits(1000.0)
    assert math.isfinite(1e6 * largest) and of_nats(999.9 * math.log(2)) == pytest.approx(of_bits(999.9))


def test_of_nothing_that_is_a_number():
    assert math.isnan(of_bits(math.nan)) and math.isnan(of_nats(math.nan))
