"""Scoring rules and metrics of the zero-shot tasks, by hand."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from smlp.evaluation.zeroshot.rules import (
    RULES,
    ScoredText,
    best_f1,
    choice,
    exact_match,
    headline_rule,
    normalised_answer,
    scores,
    standard_error,
    wilson_interval,
)


def scored(tokens, log_probs, num_context=2, num_chars=4, unconditional=None):
    return ScoredText(tuple(tokens), np.array(log_probs, dtype=float), num_context, num_chars, unconditional)


# context 1 2; candidates "3 5" and "3 6 7"; both end in 9
FIRST = scored([1, 2, 3, 5, 9], [-1, -2, -3, -4, -5], num_chars=4, unconditional=-10)
SECOND = scored([1, 2, 3, 6, 7, 9], [-1, -2, -3, -1, -2, -6], num_chars=6, unconditional=-2)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("sum", [-15, -15]),
        ("mean", [-4.5, -3]),  # after 1 2 3, which the candidates share
        ("suffix", [-5, -6]),
        ("continuation", [-12, -12]),
        ("tokens", [-4, -3]),  # of the completion: 3 5 9 and 3 6 7 9
        ("chars", [-3, -2]),
        ("unconditional", [-2, -10]),
    ],
)
def test_rules(rule, expected):
    assert scores(rule, [FIRST, SECOND]) == pytest.approx(expected)


def test_what_all_share_need_not_be_scored():
    """As scored from the third token on: only the sum, which loses the same for both, changes."""
    texts = [dataclasses.replace(text, log_probs=text.log_probs[2:]) for text in (FIRST, SECOND)]
    for rule in RULES:
        offset = 3 if rule == "sum" else 0
        assert scores(rule, texts) == pytest.approx([score + offset for score in scores(rule, [FIRST, SECOND])])


def test_nothing_shared_at_the_end_is_not_the_whole_of_one_text():
    """``[-0:]`` would take the whole of every text, shared or not; here that is what is meant, and said."""
    texts = [scored([1, 2, 3], [-1, -2, -3]), scored([1, 2, 4], [-1, -2, -5])]
    assert scores("suffix", texts) == [-6, -8]


def test_a_text_that_begins_another_still_has_a_mean():
    texts = [scored([1, 2], [-1, -2]), scored([1, 2, 4], [-1, -2, -5])]
    assert scores("mean", texts) == [-2, -5]
    same = [scored([1, 2], [-1, -2]), scored([1, 2], [-1, -2])]
    assert scores("mean", same) == [-2, -2] and choice(scores("mean", same)) == 0


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_numbers_that_are_none_choose_nothing(rule, bad):
    texts = [scored([1, 2, 3], [-1, -2, bad], unconditional=0.0), scored([1, 2, 3], [-1, -2, -3], unconditional=0.0)]
    with pytest.raises(FloatingPointError):
        scores(rule, texts)


def test_the_first_of_equals_is_chosen():
    assert choice([-2.0, -1.0, -1.0]) == 1


def test_headline_rules():
    assert headline_rule("copa", "fair") == "mean" and headline_rule("winogrande", "fair") == "suffix"
    assert headline_rule("winogrande", "gpt3") == headline_rule("piqa", "gpt3") == "tokens"
    assert headline_rule("winogrande", "lm-eval") == headline_rule("record", "lm-eval") == "continuation"


@pytest.mark.parametrize(("right", "count"), [(0, 10), (10, 10), (1, 1), (37, 100), (500, 1267)])
def test_wilson_interval(right, count):
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson_interval(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_standard_error():
    assert standard_error(0.5, 101) == pytest.approx(0.05)
    assert math.isnan(standard_error(1.0, 1)) and math.isnan(wilson_interval(0.0, 0)[0])


def test_exact_match_and_f1():
    assert normalised_answer("The  U.S. an' A  dog!") == "us dog"
    assert exact_match("the Trump", ["Donald Trump", "Trump"]) == 1 and exact_match("Trumps", ["Trump"]) == 0
    assert best_f1("Donald J. Trump", ["Trump", "Donald Trump"]) == pytest.approx(2 * 2 / 5)
    assert best_f1("The", ["a"]) == 0 and best_f1("The", ["dog"]) == 0 and best_f1("cat", ["dog"]) == 0
