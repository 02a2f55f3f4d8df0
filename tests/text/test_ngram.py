"""Kneser-Ney against a slow dictionary version, as a distribution, and by hand."""

import math
from collections import defaultdict

import numpy as np
import pytest

from smlp.errors import UserError
from smlp.evaluation.perplexity import Perplexity, TextSize, measure_text
from smlp.text.ngram import DEFAULT_DISCOUNT, NGramModel

VOCAB = 13


def zipf_tokens(count: int, seed: int, vocab: int = VOCAB) -> np.ndarray:
    """A stream with repeated patterns, so that every order has counts 1, 2, 3 and more."""
    generator = np.random.default_rng(seed)
    shares = 1 / np.arange(1, vocab)  # the last token never occurs
    tokens = generator.choice(vocab - 1, size=count, p=shares / shares.sum())
    follow = generator.random(count) < 0.5
    for index in range(1, count):
        if follow[index]:
            tokens[index] = (3 * tokens[index - 1] + 1) % (vocab - 1)
    return tokens


class SlowModel:
    """The definition, with a dictionary from each k-gram to its count."""

    def __init__(self, tokens: list[int], order: int, vocab: int) -> None:
        self.vocab, self.order = vocab, order
        self.counts: dict[int, dict[tuple[int, ...], int]] = {}
        for k in range(1, order + 1):
            counts: dict[tuple[int, ...], int] = defaultdict(int)
            if k == order:
                for start in range(len(tokens) - k + 1):
                    counts[tuple(tokens[start : start + k])] += 1
            else:
                for gram in {tuple(tokens[start : start + k + 1]) for start in range(len(tokens) - k)}:
                    counts[gram[1:]] += 1
            self.counts[k] = dict(counts)

    def discount(self, k: int, count: int) -> float:
        values = list(self.counts[k].values())
        n = {c: values.count(c) for c in (1, 2, 3, 4)}
        c = min(count, 3)
        if not n[1] or not n[2] or not n[c]:
            # Counts of 3 or more use the number of counts that are exactly 3.
            return DEFAULT_DISCOUNT
        estimate = c - (c + 1) * n[1] / (n[1] + 2 * n[2]) * n[c + 1] / n[c]
        return estimate if 0 < estimate < c else DEFAULT_DISCOUNT

    def prob(self, context: tuple[int, ...], token: int) -> float:
        k = len(context) + 1
        lower = 1 / self.vocab if k == 1 else self.prob(context[1:], token)
        after = {gram: count for gram, count in self.counts[k].items() if gram[:-1] == context}
        if not after:
            return lower
        total = sum(after.values())
        left_over = sum(self.discount(k, count) for count in after.values()) / total
        count = after.get((*context, token), 0)
        return (count - self.discount(k, count) if count else 0.0) / total + left_over * lower

    def log_probs(self, tokens: list[int]) -> list[float]:
        return [
            math.log(self.prob(tuple(tokens[max(0, index - self.order + 1) : index]), token))
            for index, token in enumerate(tokens)
        ]


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_equals_the_slow_version_token_by_token(order):
    train, test = zipf_tokens(400, 1), np.append(zipf_tokens(60, 2), [VOCAB - 1, 0, VOCAB - 1, VOCAB - 1, 3])
    fast = NGramModel.fit(train, order, VOCAB).log_probs(test)
    slow = SlowModel(train.tolist(), order, VOCAB).log_probs(test.tolist())
    np.testing.assert_allclose(fast, slow, rtol=0, atol=1e-12)
    assert np.all(np.isfinite(fast))


@pytest.mark.parametrize("train", [zipf_tokens(300, 3), np.array([5, 5, 5]), np.arange(VOCAB), np.array([1, 2, 3])])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_is_a_distribution_after_any_context(train, order):
    model = NGramModel.fit(train, order, VOCAB)
    contexts = [[], [0], [VOCAB - 1], [1, 2], [5, 5, 5], [VOCAB - 1, 3], train[-2:].tolist(), train[:2].tolist()]
    for context in contexts:
        logs = [model.log_probs(np.array([*context, token]))[-1] for token in range(VOCAB)]
        assert math.fsum(map(math.exp, logs)) == pytest.approx(1.0, abs=1e-12)
        assert min(logs) > -math.inf


def test_unigram_by_hand():
    # Counts 3, 1, 1: n1 = 2, no twos, so that every discount is the default.
    model = NGramModel.fit(np.array([0, 0, 0, 1, 2]), 1, 4)
    kept_back = 3 * DEFAULT_DISCOUNT / 5 / 4
    expected = [(3 - DEFAULT_DISCOUNT) / 5, (1 - DEFAULT_DISCOUNT) / 5, (1 - DEFAULT_DISCOUNT) / 5, 0]
    np.testing.assert_allclose(np.exp(model.log_probs(np.arange(4))), np.array(expected) + kept_back)


def test_lower_orders_count_neighbours_not_occurrences():
    # 7 occurs often, but only after 6; 1 occurs less often, after many tokens.
    train = np.array([6, 7] * 20 + [2, 1, 3, 1, 4, 1, 5, 1, 8, 1])
    after_unseen = NGramModel.fit(train, 2, 10)
    assert after_unseen.log_probs(np.array([9, 1]))[1] > after_unseen.log_probs(np.array([9, 7]))[1]
    alone = NGramModel.fit(train, 1, 10)
    assert alone.log_probs(np.array([1]))[0] < alone.log_probs(np.array([7]))[0]


def test_longer_contexts_help_on_patterned_text():
    pattern = np.tile([1, 2, 3, 1, 2, 4, 5, 2, 3], 50)
    losses = [-NGramModel.fit(pattern, order, VOCAB).log_probs(pattern[:90]).mean() for order in (1, 2, 3)]
    assert losses[0] > losses[1] > losses[2]


def test_large_vocabularies_do_not_overflow():
    train = np.array([50_000, 51_199, 3, 50_000, 51_199, 4], dtype=np.uint16)
    model = NGramModel.fit(train, 5, 51_200)
    assert np.all(np.isfinite(model.log_probs(train)))
    assert model.log_probs(np.array([50_000, 51_199]))[1] > math.log(0.2)


@pytest.mark.parametrize(
    ("tokens", "order", "message"),
    [
        ([1, 2, 13], 2, "token 13 is outside the vocabulary of 13"),
        ([1, -1, 2], 2, "token -1 is outside"),
        ([1, 2], 3, "order 3 needs at least 3 tokens, not 2"),
        ([1, 2], 0, "at least 1, not 0"),
        ([], 1, "non-empty row of integers"),
        ([[1, 2]], 1, "non-empty row of integers"),
        ([1.5], 1, "non-empty row of integers"),
    ],
)
def test_bad_input_is_a_user_error(tokens, order, message):
    with pytest.raises(UserError, match=message):
        NGramModel.fit(np.array(tokens), order, VOCAB)


def test_scoring_checks_its_tokens_too():
    with pytest.raises(UserError, match="token 99 is outside"):
        NGramModel.fit(np.arange(5), 2, VOCAB).log_probs(np.array([1, 99]))


def test_perplexity_conventions(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one two three\n\nfour\n")
    size = measure_text(path)
    assert size == TextSize(num_words=4, num_lines=3, num_bytes=20)
    # 4 words of one token each and 3 line ends, each with probability 1/8.
    perplexity = Perplexity.of(np.full(7, math.log(1 / 8)), size)
    assert perplexity.per_token == pytest.approx(8)
    assert perplexity.per_word == pytest.approx(8 ** (7 / 4))
    assert perplexity.per_word_or_line_end == pytest.approx(8)
    assert perplexity.bits_per_token == pytest.approx(3) and perplexity.bits_per_byte == pytest.approx(7 * 3 / 20)
    path.write_bytes(b"one two three\r\n\r\nfour")  # fairseq-preprocess makes the same of it
    assert measure_text(path) == size


def test_perplexity_of_nothing_and_of_bad_files(tmp_path):
    with pytest.raises(UserError, match="at least one token, not 0"):
        Perplexity.of(np.zeros(0), TextSize(1, 1, 1))
    without_words = Perplexity.of(np.full(3, -1.0), TextSize(0, 3, 0))
    assert without_words.per_word is None and without_words.bits_per_byte is None
    assert without_words.per_word_or_line_end == pytest.approx(math.e)
    assert Perplexity.of(np.full(1000, -1.0), TextSize(1, 0, 1)).per_word == math.inf
    with pytest.raises(UserError, match=r"gone.txt cannot be read"):
        measure_text(tmp_path / "gone.txt")
    (tmp_path / "latin.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"latin.txt is not UTF-8"):
        measure_text(tmp_path / "latin.txt")
