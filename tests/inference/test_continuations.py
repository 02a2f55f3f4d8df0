"""Prompts and continuations as text: what a notebook user calls."""

import pytest
import torch
from tiny_checkpoints import WORDS, write_checkpoint

import smlp
from smlp.inference.generation import BeamSearch, Sampling
from smlp.inference.generation.continuations import TextWriter
from smlp.text.tokenizer import Vocabulary


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return smlp.load_pretrained(write_checkpoint(tmp_path_factory.mktemp("words"), WORDS)[0])


PROMPTS = ["the s1 v1", "a", "", "the s2 v2 a o1"]


def test_a_prompt_gives_a_text_and_prompts_give_texts(lm):
    one = lm.generate("the s1 v1", max_tokens=5, seed=4)
    assert isinstance(one, str) and one.startswith(" ")
    many = lm.generate(PROMPTS, max_tokens=5, seed=4)
    assert len(many) == 4 and many[0] == one
    drawn = lm.generate("the s1 v1", max_tokens=5, seed=4, num_return=3)
    assert len(set(drawn)) == 3 and drawn[0] == one
    assert [texts[0] for texts in lm.generate(PROMPTS, max_tokens=5, seed=4, num_return=2)] == many
    assert lm.generate([], max_tokens=5) == []


def test_the_batch_size_changes_nothing_and_order_stays(lm):
    prompts = [" ".join(["the"] * (count * 7 % 8)) for count in range(20)]
    whole = list(lm.continuations(prompts, 4, seed=2))
    assert [found[0].index for found in whole] == list(range(20))
    assert [found[0].prompt for found in whole] == prompts
    for size in (1, 3, 20):
        again = list(lm.continuations(prompts, 4, seed=2, batch_size=size))
        assert [found[0].tokens for found in again] == [found[0].tokens for found in whole]


def test_texts_of_a_batch_are_there_before_the_next_batch_begins(lm, monkeypatch):
    batches, finished = [], TextWriter.finished

    def counted(self, batch):
        batches.append(batch)
        return finished(self, batch)

    monkeypatch.setattr(TextWriter, "finished", counted)
    texts = lm.continuations(["the", "the", "the", "a", "the s1 v1", "a"], 4, batch_size=2)
    assert [(found[0].index, len(batches)) for found in texts] == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3)]


def test_details_add_up(lm):
    for found in lm.continuations(PROMPTS, 5, Sampling(temperature=2.0, repetition_penalty=1.5), num_return=2):
        for continuation in found:
            before = [lm.start_token, *lm.tokenize(continuation.prompt)]
            tokens = [*before, *continuation.tokens]
            log_probs = lm(torch.tensor([tokens])).logits[0].detach().log_softmax(-1)
            expected = [log_probs[place - 1, tokens[place]].item() for place in range(len(before), len(tokens))]
            assert continuation.log_probs == pytest.approx(expected, abs=1e-4)
            assert continuation.log_prob == pytest.approx(sum(expected), abs=1e-3)
            assert continuation.text.split() == lm.detokenize(continuation.tokens).split()
            assert continuation.finish == "length" and continuation.score is None


def test_ids_and_back(lm):
    ids = lm.tokenize("the s1  v1")
    assert [lm.vocabulary.symbols[token] for token in ids] == ["the", "s1", "v1"]
    assert lm.detokenize([*ids, Vocabulary.eos, *ids]) == "the s1 v1\nthe s1 v1"
    assert lm.tokenize("") == [] and lm.tokenize("unheard") == [Vocabulary.unk]


def test_unwritable_symbols_are_not_written(lm):
    words = " ".join(lm.generate("", max_tokens=11, temperature=5.0, num_return=20)).split()
    assert len(set(words)) == 9, "all real words, and none of the special ones"


def test_lines_go_on_or_end(lm):
    going_on = lm.generate("the", max_tokens=9, temperature=3.0, num_return=30)
    assert any("\n" in text.strip("\n") for text in going_on)
    assert not any("\n " in text for text in going_on), "no space begins a line"
    ended = next(lm.continuations(["the"], 9, temperature=3.0, num_return=30, stop_at_eos=True))
    for continuation, text in zip(ended, going_on, strict=True):
        assert continuation.text == text.partition("\n")[0]
        assert continuation.finish == ("end" if "\n" in text else "length")
        assert (continuation.tokens[-1] == Vocabulary.eos) == ("\n" in text)
    held = next(lm.continuations(["the"], 9, temperature=3.0, num_return=30, stop_at_eos=True, min_tokens=4))
    assert all(len(c.tokens) > 4 for c in held) and any(c.finish == "end" for c in held)


def test_texts_end_before_a_stop_string(lm):
    free = lm.generate("the", max_tokens=9, temperature=3.0, num_return=30)
    stops = ["o1", "v1 a", "s2\nthe"]
    stopped = next(lm.continuations(["the"], 9, temperature=3.0, num_return=30, stop=stops))
    count = 0
    for text, continuation in zip(free, stopped, strict=True):
        places = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        assert continuation.text == (text[: min(places)[1]] if places else text)
        assert continuation.finish == ("stop" if places else "length")
        count += bool(places)
    assert 3 < count < 30
    assert lm.generate("the", max_tokens=9, temperature=3.0, num_return=30, stop="o1") == [
        text.partition("o1")[0] for text in free
    ]
    # what is held back as a possible beginning comes after all where the text ends
    assert lm.generate("the", max_tokens=9, temperature=3.0, stop=free[0][-4:] + "!") == free[0]


def test_streams_are_what_is_generated_and_hold_back_stops(lm):
    settings = {"max_tokens": 9, "temperature": 3.0, "stop": ["o1 the", "and"]}
    for seed in range(10):
        pieces = list(lm.stream("the", seed=seed, **settings))
        assert "".join(pieces) == lm.generate("the", seed=seed, **settings)
        assert all(pieces)
    for method in (Sampling(temperature=0), None):
        assert "".join(lm.stream("a", 6, method)) == lm.generate("a", 6, method)


def test_beam_search_gives_the_best_first(lm):
    (found,) = lm.continuations(["the s1"], 6, BeamSearch(4), num_return=3)
    assert [c.draw for c in found] == [0, 1, 2]
    assert [c.score for c in found] == sorted((c.score for c in found), reverse=True)
    assert all(c.tokens[-1] == Vocabulary.eos and "\n" not in c.text for c in found)
    assert lm.generate("the s1", max_tokens=6, beam=4, num_return=3) == [c.text for c in found]
    assert lm.generate(["the s1", "a"], max_tokens=6, beam=4)[0] == found[0].text
    (penalised,) = lm.continuations(["the s1"], 6, beam=4, length_penalty=-3.0)
    assert len(penalised[0].tokens) <= len(found[0].tokens)


REFUSED = [
    ({"num_return": 0}, "num_return"),
    ({"num_return": 2, "greedy": True}, "num_return=2.*same"),
    ({"num_return": 3, "beam": 2}, "num_return=3.*beam=2"),
    ({"beam": 2, "stop": "a"}, "stop strings.*beam"),
    ({"beam": 2, "when_full": "slide"}, "sliding.*beam"),
    ({"batch_size": 0}, "batch_size"),
    ({"stop": ""}, "stop string must not be empty"),
    ({"stop": "\udcff"}, "has a lone surrogate"),
    ({"method": Sampling(), "seed": 2}, "seed: give these settings to the method"),
    ({"temprature": 1}, "temprature"),
    ({"max_tokens": 12}, "prompt 2: 2 prompt tokens.*max_tokens=12"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_does_not_go_together_is_named_before_anything_is_written(lm, options, words):
    with pytest.raises(smlp.UserError, match=words):
        lm.continuations(["", "the"] if "max_tokens" in options else ["the"], **{"max_tokens": 5, **options})


def test_a_search_cannot_be_streamed(lm):
    with pytest.raises(smlp.UserError, match="beam search"):
        lm.stream("the", 5, beam=2)
    with pytest.raises(smlp.UserError, match="a stream is one text, so that num_return must be 1, got 2"):
        lm.stream("the", 5, num_return=2)
    with pytest.raises(smlp.UserError, match="fill_prefix must be True or False, got 'no'"):
        lm.stream("the", 5, fill_prefix="no")
    with pytest.raises(smlp.UserError, match="stop_at_eos must be True or False, got 'off'"):
        lm.stream("the", 5, stop_at_eos="off")
