"""Beam search against fairseq's generator, and against trying every text."""

import itertools

import pytest
import torch

import smlp
from smlp.evaluation.leak import randomise
from smlp.inference.generation import BeamSearch, Limits, beam_search

EOS, UNK = 2, 3
SMALL = {"max_tokens": 14, "embed_dim": 16, "ffn_dim": 16, "num_dense_layers": 1, "num_experts": 4}
#: sparse layers, and how much likelier the end symbol is made (in logits), so that texts of all lengths are found
ARCHS = {"gmlp_lm": (0, 1.3), "smlp": (1, 0.35), "switch_lm": (1, 1.0)}


def make(arch, vocab_size=24):
    num_sparse, push = ARCHS[arch]
    model = randomise(smlp.build(arch, vocab_size=vocab_size, num_sparse_layers=num_sparse, **SMALL)).eval()
    end = model.embedding.weight.data[EOS]
    model.norm.weight.data *= 0.5
    model.norm.bias.data = push * end / end.dot(end)
    return model


def by_fairseq(core, prompts, beam, max_length, length_penalty, min_length=1):
    """What fairseq's generator makes of a batch of prompts: tokens, score and positional scores of each hypothesis."""
    from fairseq.data import Dictionary
    from fairseq.sequence_generator import SequenceGenerator

    from smlp.models.language_model import LanguageModelDecoder, SparseMLPLanguageModel

    dictionary = Dictionary()
    for number in range(core.config.vocab_size - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    model = SparseMLPLanguageModel(LanguageModelDecoder(dictionary, core))
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam, max_len_b=max_length, min_len=min_length, len_penalty=length_penalty
    )
    longest = max(map(len, prompts))
    tokens = torch.tensor([prompt + [dictionary.pad()] * (longest - len(prompt)) for prompt in prompts])
    prefix = tokens[:, 1:] if longest > 1 else None
    found = generator.generate([model], {"net_input": {"src_tokens": tokens}}, prefix_tokens=prefix)
    return [
        [(h["tokens"].tolist(), float(h["score"]), h["positional_scores"].tolist()) for h in hypotheses]
        for hypotheses in found
    ]


def compare(ours, theirs, prompt):
    assert len(ours) == len(theirs)
    for text, (tokens, score, positional) in zip(ours, theirs, strict=True):
        assert prompt[1:] + text.tokens == tokens
        assert text.score == pytest.approx(score, abs=1e-4)
        assert text.log_probs == pytest.approx(positional[len(prompt) - 1 :], abs=1e-4)


@pytest.mark.parametrize("arch", ARCHS)
def test_it_is_fairseqs(arch):
    core = make(arch)
    prompts = [[2, 5, 6], [2, 20, 9], [2, 11, 11], [2, 8, 15]]
    finishes, lengths = set(), set()
    for beam, penalty in itertools.product((1, 2, 3, 5), (0.0, 1.0, 2.5)):
        theirs = by_fairseq(core, prompts, beam, 9, penalty)
        ours = beam_search(core, prompts, Limits(7, end=EOS), BeamSearch(beam, penalty))
        for prompt, our, their in zip(prompts, ours, theirs, strict=True):
            compare(our, their, prompt)
            finishes |= {text.finish for text in our}
            lengths |= {len(text.tokens) for text in our}
    assert finishes == {"end", "length"} and len(lengths) > 3, "the cases are too easy"


@pytest.mark.parametrize("arch", ARCHS)
def test_prompts_of_different_lengths_and_least_lengths(arch, monkeypatch):
    monkeypatch.setattr("smlp.inference.generation.beam._POSITIONS", 2)
    core = make(arch)
    prompts = [[2, 5, 6, 9, 10], [2, 20], [2, 8, 15, 4]]
    # next to others with a prompt, fairseq may end an empty one at once
    theirs = [*by_fairseq(core, prompts, 4, 10, 1.0), *by_fairseq(core, [[2]], 4, 10, 1.0)]
    for prompt, their in zip([*prompts, [2]], theirs, strict=True):
        (ours,) = beam_search(core, [prompt], Limits(11 - len(prompt), end=EOS), BeamSearch(4))
        compare(ours, their, prompt)
    theirs = by_fairseq(core, prompts[1:2], 4, 8, 1.0, min_length=5)
    ours = beam_search(core, prompts[1:2], Limits(7, min_tokens=4, end=EOS), BeamSearch(4))
    compare(ours[0], theirs[0], prompts[1])
    assert all(len(text.tokens) > 4 for text in ours[0])


@pytest.mark.parametrize("arch", ARCHS)
def test_batch_mates_change_nothing(arch):
    core = make(arch)
    prompts = [[2, 5, 6, 9, 10], [2], [2, 20, 7], [2, 5, 6]]
    limits, beam = Limits(6, end=EOS), BeamSearch(3)
    together = beam_search(core, prompts, limits, beam)
    for number, prompt in enumerate(prompts):
        (alone,) = beam_search(core, [prompt], limits, beam)
        assert [text.tokens for text in together[number]] == [text.tokens for text in alone]
        for one, other in zip(together[number], alone, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-5) and one.prompt == number
            assert one.draw == other.draw


def test_no_prompts_give_no_texts():
    assert beam_search(make("smlp"), [], Limits(3, end=EOS)) == []


def test_a_wide_beam_finds_what_trying_everything_finds():
    core = make("smlp", vocab_size=7)
    prompt, words, longest = [2, 5, 4], [4, 5, 6], 3
    scored = {}
    for count in range(longest + 1):
        for body in itertools.product(words, repeat=count):
            text = [*prompt, *body, EOS]
            log_probs = core(torch.tensor([text[:-1]])).logits[0].log_softmax(-1)
            total = sum(log_probs[place, token].item() for place, token in enumerate(text[1:]))
            scored[(*body, EOS)] = total / (len(text) - 1) ** 0.7
    assert len(scored) == 40
    (found,) = beam_search(core, [prompt], Limits(longest, end=EOS), BeamSearch(40, 0.7), banned=[0, UNK])
    assert [tuple(text.tokens) for text in found] == sorted(scored, key=scored.get, reverse=True)
    for text in found:
        assert text.score == pytest.approx(scored[tuple(text.tokens)], abs=1e-5)
    (narrow,) = beam_search(core, [prompt], Limits(longest, end=EOS), BeamSearch(2, 0.7), banned=[0, UNK])
    assert len(narrow) == 2 and all(tuple(text.tokens) in scored for text in narrow)


@pytest.mark.parametrize("arch", ["gmlp_lm", "smlp_partial"])
def test_an_empty_prompt_is_not_answered_with_the_end_alone(arch):
    """Nor where it is filled; a prompt that is filled may be."""
    num_sparse = int(arch == "smlp_partial")
    core = randomise(smlp.build(arch, vocab_size=24, num_sparse_layers=num_sparse, **SMALL)).eval()
    end = core.embedding.weight.data[EOS]
    core.norm.bias.data = 9 * end / end.dot(end)
    (empty,), (given,) = beam_search(core, [[2], [2, 5]], Limits(4, end=EOS), BeamSearch(1), fill=2)
    assert len(empty.tokens) > 1 and given.tokens == [EOS]


def test_the_context_ends_texts_or_refuses_them():
    core = make("gmlp_lm")
    prompt = [2, 5, 6, 7, 8, 9, 10, 11]
    # 8 + 6 positions: the last new token is read too, for the end after it
    assert beam_search(core, [prompt], Limits(6, min_tokens=6, end=EOS), BeamSearch(2))[0][0].finish == "length"
    with pytest.raises(smlp.UserError, match=r"8 prompt tokens.*7 new ones need 15 positions.*max_tokens=14"):
        beam_search(core, [prompt], Limits(7, end=EOS), BeamSearch(2))
    (cut,) = beam_search(core, [prompt], Limits(50, min_tokens=6, end=EOS, when_full="stop"), BeamSearch(2))
    assert [len(text.tokens) for text in cut] == [7, 7] and cut[0].finish == "context"
    with pytest.raises(smlp.UserError, match="slide"):
        beam_search(core, [prompt], Limits(5, end=EOS, when_full="slide"))
    with pytest.raises(smlp.UserError, match="end"):
        beam_search(core, [prompt], Limits(5))
    with pytest.raises(smlp.UserError, match=f"the id that ends a text, {EOS}, and it is padding or in banned"):
        beam_search(core, [prompt], Limits(5, end=EOS), banned=[EOS])
    for end in (-1, core.config.vocab_size):
        with pytest.raises(smlp.UserError, match=rf"end must be ids from 0 to .*, got \[{end}\]"):
            beam_search(core, [prompt], Limits(5, end=end))
