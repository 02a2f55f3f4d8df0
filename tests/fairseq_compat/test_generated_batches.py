"""Many prompts at a time: what is written for one must not depend on the others."""

import pytest
import torch
from tiny_decoders import VARIANTS, make

import smlp
from smlp.config.presets import PRESETS
from smlp.inference.generation import Limits, Sampling, sampled_texts
from smlp.nn.state import DecodingState

#: of quite different lengths; the longest ends five positions before the context does
PROMPTS = [[2, 5, 6, 7], [2, 9], [2, 30, 31, 32, 33, 34, 35], [2, 9, 9, 8, 4], [2, 6, 5, 4]]


def finished(*args, **kwargs):
    """What is written, in order of prompts and draws."""
    texts = [text for text in sampled_texts(*args, **kwargs) if text.finish is not None]
    return sorted(texts, key=lambda text: (text.prompt, text.draw))


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_mates_change_nothing(variant):
    decoder = make(variant)
    limits, method, fill = Limits(5, end=11), Sampling(seed=3), 2
    together = finished(decoder, PROMPTS, limits, method, banned=[0, 1], fill=fill)
    assert [text.prompt for text in together] == [0, 1, 2, 3, 4]
    for prompt, text in zip(PROMPTS, together, strict=True):
        (alone,) = finished(decoder, [prompt], limits, method, banned=[0, 1], fill=fill)
        assert (alone.tokens, alone.finish) == (text.tokens, text.finish)
        assert alone.log_probs == pytest.approx(text.log_probs, abs=1e-4)
        assert len(text.tokens) == 5 or text.tokens[-1] == 11


@pytest.mark.parametrize("variant", ["smlp", "gmlp_moe", "partial", "switch"])
def test_greedy_batches_follow_the_full_forward(variant):
    decoder, least = make(variant), 4
    texts = finished(decoder, PROMPTS, Limits(5), Sampling(temperature=0), banned=[1], fill=2)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        tokens = [2] * (least - len(prompt)) * (variant == "partial") + prompt
        for token, log_prob in zip(text.tokens, text.log_probs, strict=True):
            logits = decoder(torch.tensor([tokens])).logits[0, -1].detach()
            assert log_prob == pytest.approx(logits.log_softmax(0)[token].item(), abs=1e-4)
            logits[1] = -torch.inf
            assert token == int(logits.argmax())
            tokens.append(token)


def test_draws_are_different_and_the_first_is_what_one_draw_gives():
    decoder = make("smlp")
    one = finished(decoder, PROMPTS, Limits(5), Sampling(), banned=[1])
    four = finished(decoder, PROMPTS, Limits(5), Sampling(), num_return=4, banned=[1])
    assert [(text.prompt, text.draw) for text in four] == [(p, d) for p in range(5) for d in range(4)]
    assert [text.tokens for text in four if text.draw == 0] == [text.tokens for text in one]
    for prompt in range(5):
        assert len({tuple(text.tokens) for text in four if text.prompt == prompt}) == 4
    other = finished(decoder, PROMPTS[:1], Limits(5), Sampling(seed=2), num_return=4, banned=[1])
    assert not {tuple(text.tokens) for text in other} & {tuple(text.tokens) for text in four if text.prompt == 0}


def test_each_prompt_is_read_once_and_ended_texts_cost_nothing(monkeypatch):
    decoder = make("smlp")
    shapes = []
    features = decoder.features
    monkeypatch.setattr(
        decoder, "features", lambda ids, *more: (shapes.append(tuple(ids.shape)), features(ids, *more))[1]
    )
    prompts = [[2, 5, 6, 7, 8, 9], [2, 5, 6]]
    for text in sampled_texts(decoder, prompts, Limits(4), Sampling(), num_return=3):
        if text.prompt == 1 and len(text.tokens) == 2:
            text.finish = "stop"
    # both to the end of the shorter prompt; its three draws; they have ended, what is left of the other prompt at once;
    # its three draws
    assert shapes == [(2, 3), (4, 1), (1, 2), (3, 1), (3, 1), (3, 1)]


def test_sliding_batches_are_as_each_alone():
    decoder = make("smlp")
    prompts = [*PROMPTS[1:4], list(range(2, 30))]
    limits = Limits(20, when_full="slide")
    together = finished(decoder, prompts, limits, Sampling(), banned=[1])
    for prompt, text in zip(prompts, together, strict=True):
        (alone,) = finished(decoder, [prompt], limits, Sampling(), banned=[1])
        assert alone.tokens == text.tokens and len(text.tokens) == 20 and text.finish == "length"


def test_texts_stop_where_the_context_is_full():
    texts = finished(make("gmlp"), PROMPTS, Limits(9, when_full="stop"), Sampling(), banned=[1])
    # the last token is not read: 12 positions, 13 tokens
    assert [len(text.tokens) for text in texts] == [9, 9, 6, 8, 9]
    assert [text.finish for text in texts] == ["length", "length", "context", "context", "length"]
    with pytest.raises(smlp.UserError, match=r"prompt 3: 7 prompt tokens.*9 new ones need 15 positions.*max_tokens=12"):
        sampled_texts(make("gmlp"), PROMPTS, Limits(9))
    with pytest.raises(smlp.UserError, match=r"14 prompt tokens"):
        sampled_texts(make("gmlp"), [[2] * 14], Limits(1, when_full="stop"))


def test_the_end_is_held_off():
    decoder = make("gmlp")
    texts = finished(decoder, PROMPTS, Limits(5, end=7), Sampling(temperature=4.0), num_return=30)
    assert {len(text.tokens) for text in texts if text.finish == "end"} >= {1, 2, 3}
    texts = finished(decoder, PROMPTS, Limits(5, min_tokens=3, end=7), Sampling(temperature=4.0), num_return=30)
    assert {len(text.tokens) for text in texts if text.finish == "end"} == {4, 5}
    assert all(7 not in text.tokens[:3] for text in texts)


def test_partial_routing_fills_or_refuses():
    with pytest.raises(smlp.UserError, match=r"prompt 2: the prompt has 2 tokens.*at least 4"):
        sampled_texts(make("partial"), PROMPTS, Limits(2))
    leaky = smlp.build("smlp_leaky", vocab_size=40, max_tokens=12, embed_dim=16, ffn_dim=24, num_experts=4)
    with pytest.raises(smlp.UserError, match="cannot generate text"):
        sampled_texts(leaky, PROMPTS, Limits(2))


@pytest.mark.parametrize("arch", PRESETS)
def test_no_preset_drops_tokens_in_evaluation(arch):
    assert smlp.preset(arch).eval_capacity_factor == 0


def test_room_is_kept_only_for_what_is_read(monkeypatch):
    capacities = []
    init = DecodingState.__init__
    monkeypatch.setattr(
        DecodingState, "__init__", lambda self, room=None: (capacities.append(room), init(self, room))[1]
    )
    finished(make("gmlp"), PROMPTS, Limits(3), Sampling())
    assert capacities[0] == 7 + 3 - 1
