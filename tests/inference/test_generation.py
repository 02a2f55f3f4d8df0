"""Writing text: greedy, sampling, seeds, the end of the context."""

import numpy as np
import pytest
import torch

import smlp
from smlp.evaluation.leak import randomise
from smlp.inference.generation import Limits, Sampling, beam_search, generate, method_of
from smlp.inference.generation.prompts import ready_prompts
from smlp.inference.generation.sampled import choose, penalise, sampled_texts


@pytest.fixture(scope="module")
def model():
    settings = {"vocab_size": 30, "max_tokens": 16, "embed_dim": 16, "ffn_dim": 16}
    small = smlp.build("smlp", num_dense_layers=1, num_sparse_layers=1, num_experts=4, **settings)
    return randomise(small).eval()


def test_greedy_follows_the_full_forward(model):
    tokens = [2, 7, 9]
    written = list(generate(model, tokens, 10, Sampling(temperature=0)))
    for token in written:
        logits = model(torch.tensor([tokens])).logits[0, -1]
        assert token == int(logits.argmax())
        tokens.append(token)


def test_the_context_can_be_filled_to_the_last_token(model):
    # 4 + 13 - 1 = 16 positions: the last token is written but never read
    assert len(list(generate(model, [2, 5, 6, 7], 13, Sampling(temperature=0)))) == 13


def test_past_the_context_is_an_error_before_anything_is_written(model):
    with pytest.raises(smlp.UserError, match=r"4 prompt tokens.*14 new ones need 17 positions.*max_tokens=16"):
        generate(model, [2, 5, 6, 7], 14)


def test_a_prompt_that_leaves_less_room_than_texts_must_have_is_refused_with_what_helps(model):
    def refusal(num_tokens, **limits):
        with pytest.raises(smlp.UserError) as raised:
            ready_prompts(model.config, [[5] * num_tokens], Limits(**limits))
        return str(raised.value)

    start = (
        "{} prompt tokens (start symbol included) and {} new ones need {} positions, but the model has max_tokens=16: "
    )
    said = refusal(10, max_tokens=20, min_tokens=8, end=2, when_full="stop")
    assert said == start.format(10, 8, 17) + "lower min_tokens=8, give a shorter prompt, or allow sliding"
    assert refusal(17, when_full="stop") == start.format(17, 1, 17) + "give a shorter prompt, or allow sliding"
    asked = start.format(10, 8, 17) + "ask for fewer tokens, let texts stop there, or allow sliding"
    assert refusal(10, max_tokens=8) == asked


def test_sliding_goes_on_from_the_later_half(model):
    greedy = Sampling(temperature=0)
    for prompt in ([2, 5, 6, 7], [2, 9], list(range(2, 30)) * 2):
        written = list(generate(model, prompt, 40, greedy, when_full="slide"))
        text, window = list(prompt), prompt[-16:]
        for token in written:
            if len(window) > 16:
                window = text[-8:]
            assert token == int(model(torch.tensor([window])).logits[0, -1].argmax())
            text, window = [*text, token], [*window, token]
        assert len(written) == 40


def test_the_seed_decides(model):
    def sample(seed):
        return list(generate(model, [2], 12, Sampling(seed=seed)))

    assert sample(1) == sample(1)
    assert any(sample(1) != sample(seed) for seed in (2, 3, 4))


def test_banned_tokens_are_never_written(model):
    banned = [0, 1, 3, *range(10, 30)]
    written = list(generate(model, [2], 16, Sampling(temperature=3.0), banned=banned))
    assert not set(written) & set(banned)
    for wrong, words in (([5000], "banned must be ids from 0 to"), ([-1], "banned must be"), (["a"], "banned must be")):
        with pytest.raises(smlp.UserError, match=words):
            generate(model, [2], 3, banned=wrong)
    with pytest.raises(smlp.UserError, match="none is left to choose"):
        generate(model, [2], 3, banned=range(model.config.vocab_size))


def draws(sampling, logits, count=300):
    generator = torch.Generator().manual_seed(0)
    return set(choose(torch.tensor([logits] * count), sampling, [generator] * count))


def test_top_k_and_top_p_cut_the_tail():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert draws(Sampling(), logits) == {0, 1, 2, 3}
    assert draws(Sampling(top_k=2), logits) == {0, 1}
    assert draws(Sampling(top_p=0.6), logits) == {0, 1}  # 0.5 is not yet 0.6
    assert draws(Sampling(top_p=0.5), [0.0, 0.0]) == {0}
    assert draws(Sampling(temperature=0), logits) == {0}
    assert draws(Sampling(temperature=0.01), logits) == {0}
    assert draws(Sampling(temperature=1e-30), [-3e38, -2e38]) == {1}  # after the largest penalty


def test_frequencies_follow_the_distribution():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    drawn = choose(probabilities.log().expand(4000, -1), Sampling(), [generator] * 4000)
    counts = torch.bincount(torch.tensor(drawn), minlength=3)
    assert (counts / 4000 - probabilities).abs().max() < 0.03


def test_whole_numbers_of_any_size_are_settings():
    """torch takes none of more than 64 bits."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    assert choose(logits, Sampling(temperature=10**20), [generator])[0] in (0, 1, 2)
    penalise(logits[0], [0], 10**20)
    assert logits.argmax() == 1


def test_rows_are_drawn_apart_and_never_beyond_the_last_token():
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2, 1)]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    logits[2] = logits[0]
    logits[:, 40:] = -torch.inf
    draws = [choose(logits, Sampling(top_p=0.9, top_k=30), generators) for _ in range(200)]
    assert all(first == third for first, _, third in draws) and any(first != second for first, second, _ in draws)
    alone = torch.Generator().manual_seed(2)
    assert [choose(logits[1:2], Sampling(top_p=0.9, top_k=30), [alone])[0] for _ in range(200)] == [d[1] for d in draws]
    assert max(max(draw) for draw in draws) < 40


def test_the_largest_random_number_draws_the_last_possible_token(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **more: torch.ones(*size, dtype=torch.float64))
    logits = torch.zeros(1, 9)
    logits[0, 6:] = -torch.inf
    assert choose(logits, Sampling(), [None]) == [5]
    assert choose(logits, Sampling(top_p=0.4), [None]) == [2]


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("token", [0, 7])
def test_nan_and_infinity_are_refused_not_drawn(model, monkeypatch, number, token):
    """Infinite logits, as of float16, too; those of banned tokens spoil the log-probabilities of the others."""

    def spoilt(hidden):
        logits = torch.nn.functional.linear(hidden, model.embedding.weight)
        logits[..., token] = number
        return logits

    monkeypatch.setattr(model, "project", spoilt)
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(top_k=3, top_p=0.5)):
        with pytest.raises(smlp.UserError, match="next-token scores are NaN or infinite"):
            next(generate(model, [2, 5], 4, sampling, banned=[0]))
    for prompt in ([2], [2, 5, 6]):
        with pytest.raises(smlp.UserError, match="next-token scores are NaN or infinite"):
            beam_search(model, [prompt], Limits(4, end=2))


def test_a_repetition_penalty_makes_tokens_of_the_text_less_likely(model):
    method, tested = Sampling(temperature=0, repetition_penalty=1e6), 0
    for last in range(4, 30):
        prompt = [(last + place) % 30 for place in range(12)]
        before = next(generate(model, prompt, 1, Sampling(temperature=0)))
        assert next(generate(model, prompt, 1, method)) not in prompt
        tested += before in prompt
    assert tested > 2
    written = list(generate(model, [2, 5, 6], 13, method))
    assert len({2, 5, 6, *written}) == 16
    logits = torch.tensor([2.0, -2.0, 3.0])
    penalise(logits, [0, 1, 1], 2.0)
    assert logits.tolist() == [1.0, -4.0, 3.0]


BAD = [
    (lambda: Sampling(temperature=-1), "temperature"),
    (lambda: Sampling(top_k=-1), "top_k"),
    (lambda: Sampling(top_p=0), "top_p"),
    (lambda: Sampling(repetition_penalty=0.5), "repetition_penalty"),
    (lambda: Sampling(seed=-1), "seed"),
    (lambda: Limits(0), "max_tokens"),
    (lambda: Limits(3, min_tokens=4, end=2), "min_tokens.*max_tokens=3"),
    (lambda: Limits(3, min_tokens=2), "min_tokens=2"),
    (lambda: Limits(3, when_full="wrap"), "when_full"),
    (lambda: method_of(beam=0), "beam"),
    (lambda: method_of(beam=2, length_penalty=float("nan")), "length_penalty"),
    (lambda: method_of(beam=2, temperature=0.5), "beam=2.*temperature"),
    (lambda: method_of(beam=2, greedy=True), "beam=2.*greedy"),
    (lambda: method_of(greedy=True, top_p=0.5, seed=2), "greedy.*top_p, seed"),
    (lambda: method_of(length_penalty=2.0), "length_penalty needs a beam"),
    (lambda: method_of(wildness=2.0), "wildness"),
]


@pytest.mark.parametrize(("make", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_settings_are_named(make, words):
    with pytest.raises(smlp.UserError, match=words):
        make()


def test_prompts_are_ids_in_any_form(model):
    wanted = list(smlp.generate(model, [2, 5], 3))
    for prompt in (torch.tensor([2, 5]), np.array([2, 5]), (2, 5), iter([2, 5]), list(torch.tensor([2, 5]))):
        assert list(smlp.generate(model, prompt, 3)) == wanted
    assert list(smlp.generate(torch.compile(model, backend="eager"), [2, 5], 3)) == wanted
    size = model.config.vocab_size
    for wrong in ("The", [2, size], [-1], [2.5], torch.ones(1, 2), None, 3):
        with pytest.raises(smlp.UserError, match=f"the prompt must be ids from 0 to {size - 1}, got "):
            smlp.generate(model, wrong, 3)
    with pytest.raises(smlp.UserError, match="num_return must be at least 1, got 0"):
        sampled_texts(model, [[2]], Limits(3), num_return=0)
    with pytest.raises(smlp.UserError, match=r"ids are continued by a decoder, such as .*, got 'model.pt'"):
        smlp.generate("model.pt", [2], 3)


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(smlp.UserError, match="at least one token"):
        generate(model, [], 3)
