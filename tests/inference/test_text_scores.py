"""``lm.score``: texts and continuations against plain forward passes."""

import math

import pytest
import torch
from tiny_checkpoints import write_checkpoint

import smlp
from smlp.errors import UserError

WORDS = [f"w{number}" for number in range(20)]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    path, _ = write_checkpoint(tmp_path_factory.mktemp("model"), WORDS, "switch_lm_tiny", 16, eval_capacity_factor=0.5)
    return smlp.load_pretrained(path)


@torch.no_grad()
def log_probs(lm, ids):
    table = lm(torch.tensor([[2, *ids[:-1]]])).logits[0].log_softmax(1)
    return [float(table[place, token]) for place, token in enumerate(ids)]


def test_texts_and_continuations(lm):
    texts = ["w1 w2 w3", ("w1 w2", " w3 w4"), ("w1 w2", " w5"), ("", "w7\nw8")]
    scores = lm.score(texts)
    # one at a time: a capacity, which this model was trained with, would drop tokens
    ids = [lm.tokenize("w1 w2 w3"), lm.tokenize("w1 w2 w3 w4"), lm.tokenize("w1 w2 w5"), [*lm.tokenize("w7"), 2, 12]]
    for score, text, whole, first in zip(scores, texts, ids, (0, 2, 2, 0), strict=True):
        want = log_probs(lm, whole)[first:]
        assert score.tokens == whole[first:] and score.log_probs == pytest.approx(want, abs=1e-5)
        assert score.log_prob == pytest.approx(sum(want), abs=1e-4)
        assert score.perplexity == pytest.approx(math.exp(-sum(want) / len(want)), rel=1e-4)
        assert (score.context, score.text) == (("", text) if isinstance(text, str) else text)
    assert lm.score("w1 w2 w3").log_probs == pytest.approx(scores[0].log_probs, abs=1e-5)
    assert lm.score(("w1 w2", " w5")).tokens == scores[2].tokens
    written = lm.generate("w1 w2", max_tokens=2, greedy=True)
    assert lm.score(("w1 w2", written)).is_greedy and not all(score.is_greedy for score in scores)


def test_no_text_depends_on_the_others_room(lm):
    """A long continuation cuts its own context, not that of others."""
    context = " ".join(WORDS[:12])
    alone = lm.score((context, " w1"))
    beside = lm.score([(context, " w1"), (context, " w2 w3 w4 w5 w6 w7")])
    assert beside[0].log_probs == pytest.approx(alone.log_probs, abs=1e-5)
    assert [score.num_cut for score in beside] == [0, 2]
    ids = lm.tokenize(context)[2:] + beside[1].tokens
    assert beside[1].log_probs == pytest.approx(log_probs(lm, ids)[-6:], abs=1e-5)


def test_line_breaks_are_ends_of_lines_everywhere(lm):
    assert lm.tokenize("w1\nw2") == [5, 2, 6] == lm.score("w1\nw2").tokens
    assert lm.detokenize(lm.tokenize("w1\nw2 w3\n")) == "w1\nw2 w3\n"
    logits = lm(torch.tensor([[2, 5, 2, 6]])).logits[0, -1].detach()
    logits[[0, 1, 3]] = -torch.inf  # never written
    assert lm.vocabulary.symbols[int(logits.argmax())] == lm.generate("w1\nw2", max_tokens=1, greedy=True).strip()


def test_what_cannot_be_scored_is_said(lm, tmp_path):
    with pytest.raises(UserError, match="20 tokens, but the model's context holds 16"):
        lm.score(" ".join(WORDS))
    with pytest.raises(UserError, match="fill_prefix must be True or False, got 'no'"):
        lm.score("w1", fill_prefix="no")
    with pytest.raises(UserError, match="adds no token"):
        lm.score(["w1", ""])
    for size in (0, "8"):
        with pytest.raises(UserError, match=f"batch_tokens must be a whole number of at least 1, got {size!r}"):
            lm.score("w1", batch_tokens=size)
    partial = smlp.load_pretrained(write_checkpoint(tmp_path, WORDS, "smlp_partial_tiny", 20)[0])
    with pytest.raises(UserError, match="' w2' begins within the first 4 positions"):
        partial.score(("w1", " w2"))
    assert partial.score(("w1", " w2"), fill_prefix=True).log_prob < 0
