"""Scores of candidates against one plain forward pass for each, whatever else is in the batch."""

import itertools
import random
import time

import numpy as np
import pytest
import torch
from architectures import LANGUAGE_MODELS

import smlp
from smlp.errors import UserError
from smlp.evaluation.leak import randomise
from smlp.inference.scoring.batching import Reading, partition, plan_batches
from smlp.inference.scoring.candidates import CandidateScorer, drop_nothing
from smlp.inference.scoring.texts import Candidates, TokenizedText, TooLongError, common_prefix, encode_pair, fit
from smlp.moe.routers import TopKRouter
from smlp.text.tokenizer import Tokenizer, Vocabulary

START, CONTEXT = 2, 20
ARCHS = [arch for arch in LANGUAGE_MODELS if arch.endswith("_tiny")]
NARROW = {"vocab_size": 40, "max_tokens": CONTEXT, "embed_dim": 64, "ffn_dim": 64}


def tokens(draw, count):
    return tuple(draw.choices(range(4, 40), k=count))


def some_groups(prefix_tokens=0, count=6, seed=0):
    """Groups with shared contexts of 0 to 14 tokens, some candidates beginning alike, two with contexts of their own"""
    draw = random.Random(seed)
    groups = []
    for number in range(count):
        context = tokens(draw, draw.randrange(15))
        begun = tokens(draw, number % 2)
        texts = []
        for _ in range(draw.randrange(1, 5)):
            own = context + tokens(draw, 1) if number > count - 3 else context
            texts.append(TokenizedText(own + begun + tokens(draw, draw.randrange(1, 7)), len(own)))
        groups.append(fit(texts, CONTEXT, START, prefix_tokens))
    return groups


@torch.no_grad()
def one_by_one(decoder, group):
    """For every candidate of a group: log-probability of each token, and whether it is the likeliest."""
    found = []
    for text in group.texts:
        ids = torch.tensor([*group.lead, *text.tokens])
        logits = decoder(ids[None, :-1]).logits[0, group.num_filled :].double()
        target = ids[group.num_filled + 1 :]
        found.append((logits.log_softmax(1)[range(len(target)), target], logits.argmax(1) == target))
    return found


def in_batches(decoder, groups, batch_tokens, share=True):
    scorer = CandidateScorer(decoder, share)
    found = {}
    for batch in scorer.plan(groups, batch_tokens):
        found.update(zip(batch.members, scorer.score(groups, batch), strict=True))
    assert sorted(found) == list(range(len(groups)))
    return [found[place] for place in range(len(groups))]


def largest_difference(decoder, groups, results):
    worst = 0.0
    for group, scored in zip(groups, results, strict=True):
        for (log_probs, is_greedy), score in zip(one_by_one(decoder, group), scored, strict=True):
            first = len(log_probs) - len(score.log_probs)
            assert first >= decoder.config.prefix_tokens - group.num_filled
            assert first == max(group.first, decoder.config.prefix_tokens - group.num_filled) or not len(
                score.log_probs
            )
            worst = max(worst, np.abs(log_probs.numpy()[first:] - score.log_probs).max(initial=0))
            assert np.array_equal(is_greedy.numpy()[first:], score.is_greedy)
    return worst


@pytest.mark.parametrize("arch", ARCHS)
def test_scores_do_not_depend_on_batches_mates_or_order(arch):
    decoder = randomise(smlp.build(arch, **NARROW)).eval()
    for prefix_tokens in {0, decoder.config.prefix_tokens}:
        groups = some_groups(prefix_tokens)
        for batch_tokens in (40, 10_000):
            assert largest_difference(decoder, groups, in_batches(decoder, groups, batch_tokens)) < 1e-5
        turned = [Candidates(group.texts[::-1], group.num_cut, group.lead) for group in groups[::-1]]
        assert largest_difference(decoder, turned, in_batches(decoder, turned, 200)) < 1e-5
    assert largest_difference(decoder, groups, in_batches(decoder, groups, 200, share=False)) < 1e-5


def test_common_beginnings_are_read_once():
    decoder = randomise(smlp.build("smlp_tiny", **NARROW)).eval()
    context = tokens(random.Random(0), 10)
    groups = [fit([TokenizedText((*context, last), 10) for last in range(10, 14)], CONTEXT)] * 3
    sizes = []
    decoder.embedding.register_forward_hook(lambda module, args, output: sizes.append(args[0].numel()))
    in_batches(decoder, groups, 10_000)
    assert sizes == [3 * 10, 12]  # the start symbol and 9 tokens for each group, then one more token for each candidate


def test_leaky_routing_shares_nothing():
    decoder = randomise(smlp.build("smlp_leaky_tiny", **NARROW)).eval()
    batches = CandidateScorer(decoder).plan(some_groups(), 100)
    assert all(beginning.num_shared == 0 for batch in batches for beginning in batch.beginnings)


def test_a_model_that_was_trained_with_a_capacity_drops_nothing():
    decoder = randomise(smlp.build("switch_lm_tiny", **NARROW, eval_capacity_factor=0.5)).eval()
    groups = some_groups()
    assert largest_difference(decoder, groups, in_batches(decoder, groups, 10_000)) > 1e-3
    drop_nothing(decoder)
    assert largest_difference(decoder, groups, in_batches(decoder, groups, 10_000)) < 1e-5
    routers = [module for module in decoder.modules() if isinstance(module, TopKRouter)]
    assert routers and all(router.settings.capacity_factor == 1.0 for router in routers)  # training's stays


def test_a_plug_in_may_still_name_its_capacity_places(monkeypatch):
    monkeypatch.setattr(TopKRouter, "limit_places", TopKRouter.limit_capacity, raising=False)
    monkeypatch.delattr(TopKRouter, "limit_capacity")
    decoder = smlp.build("switch_lm_tiny", **NARROW, eval_capacity_factor=0.5)
    drop_nothing(decoder)
    routers = [module for module in decoder.modules() if isinstance(module, TopKRouter)]
    assert routers and all(router.settings.eval_capacity_factor == 0 for router in routers)


def test_parts_with_the_least_waste():
    """Against all ways to cut a list."""
    draw = random.Random(1)
    for _ in range(40):
        lengths = sorted((draw.randrange(1, 12) for _ in range(draw.randrange(1, 8))), reverse=True)

        def wasted(begin, end, lengths=lengths):
            return sum(lengths[begin] - length for length in lengths[begin:end])

        def waste(begins, end, wasted=wasted):
            return np.array([wasted(begin, end) for begin in begins])

        def size(begin, end, lengths=lengths):
            return lengths[begin] * (end - begin)

        def cost(cuts, lengths=lengths, waste=wasted, size=size):
            parts = list(itertools.pairwise([0, *cuts, len(lengths)]))
            if any(size(*part) > 30 and part[1] - part[0] > 1 for part in parts):
                return float("inf")
            return sum(waste(*part) + 5 for part in parts)

        inner = range(1, len(lengths))
        best = min(cost(cuts) for count in range(len(lengths)) for cuts in itertools.combinations(inner, count))
        found = partition(len(lengths), waste, size, 30, 5)
        assert cost([begin for begin, _ in found[1:]]) == best
    assert partition(0, lambda *_: 0, lambda *_: 0, 1, 1) == []


def test_passes_do_not_hold_the_states_of_a_long_beginning_too_often():
    """2,000 words after 250 tokens took 8 GB: each has a copy of the state of the beginning."""
    reading = Reading(tuple((1,) * 251 for _ in range(2000)), 250)
    (batch,) = plan_batches([reading], 1024, 10)
    rows = [sum(len(block.rows) for block in blocks) for blocks in batch.passes]
    assert sum(rows) == 2000 and max(rows) * 251 <= 4.1 * 1024


def test_many_short_texts_are_planned_in_a_moment():
    """Those of 20,000 words took a minute: each could begin with any of 8,192."""
    reading = Reading(tuple((1,) * length for length in (1, 2, 3) * 5000), 0)
    begin = time.process_time()
    (batch,) = plan_batches([reading], 8192, 512)
    assert time.process_time() - begin < 5  # 0.5 s
    assert sum(len(block.rows) for blocks in batch.passes for block in blocks) == 15_000


def test_passes_keep_to_the_batch_size_and_hold_every_candidate():
    readings = [Reading.of(group) for group in some_groups(count=60)]
    batches = plan_batches(readings, 100, 3)
    rows = [
        (batch.members[member], number)
        for batch in batches
        for blocks in batch.passes
        for block in blocks
        for member, number in block.rows
    ]
    assert sorted(rows) == [(place, n) for place, one in enumerate(readings) for n in range(len(one.inputs))]
    assert len(batches) > 2 and any(len(blocks) > 1 for batch in batches for blocks in batch.passes)
    for batch in batches:
        assert [group for one in batch.beginnings for group in one.groups] == list(range(len(batch.members)))
        begun = [one.num_shared * len(one.groups) for one in batch.beginnings]
        assert sum(begun) <= 100 or len(begun) == 1
        for one in batch.beginnings:
            assert one.num_shared == min(readings[batch.members[group]].num_shared for group in one.groups)
        for blocks in batch.passes:
            sizes = []
            for block in blocks:
                beginning = batch.beginnings[block.beginning]
                assert all(member in beginning.groups for member, _ in block.rows)
                inputs = [readings[batch.members[member]].inputs[number] for member, number in block.rows]
                sizes.append(max(len(row) - beginning.num_shared for row in inputs) * len(inputs))
            assert sum(sizes) <= 100 or (len(sizes) == 1 and len(blocks[0].rows) == 1)
    lengths = [beginning.num_shared for batch in batches for beginning in batch.beginnings]
    assert lengths == sorted(lengths, reverse=True)


def test_batches_are_bounded_where_nothing_is_read_ahead():
    """As in leaky models and records without context, next to others; a batch is about one pass."""
    draw = random.Random(0)
    contexts = [0] * 50 + [1, 5] * 5
    groups = [
        fit([TokenizedText(tokens(draw, size + draw.randrange(3, 9)), size) for _ in range(2)], CONTEXT)
        for size in contexts
    ]
    readings = [Reading.of(group, share=size > 1) for group, size in zip(groups, contexts, strict=True)]
    batches = plan_batches(readings, 100, 10)
    assert sorted(place for batch in batches for place in batch.members) == list(range(60))
    unshared = [batch for batch in batches if any(one.num_shared == 0 for one in batch.beginnings)]
    assert len(unshared) > 5
    for batch in unshared:
        members = [reading for reading in map(readings.__getitem__, batch.members) if reading.num_shared == 0]
        assert sum(len(row) for reading in members for row in reading.inputs) <= 100


class _Letters(Tokenizer):
    """A tokenizer of letters that joins ``a`` and ``b`` where they meet."""

    def encode(self, text):
        return [ord(letter) for letter in text.replace("ab", "\x07")]


Letters = _Letters(Vocabulary([]))


def test_the_context_ends_where_the_joined_text_departs_from_it():
    assert encode_pair(Letters, "xy", "z") == TokenizedText((120, 121, 122), 2)
    assert encode_pair(Letters, "xa", "bz") == TokenizedText((120, 7, 122), 1)  # the a is part of what is scored
    assert encode_pair(Letters, "", "z") == TokenizedText((122,), 0)


def test_line_breaks_are_ends_of_lines_or_spaces():
    assert encode_pair(Letters, "x\n\n", "y\nz").tokens == (120, 2, 2, 121, 2, 122)
    assert encode_pair(Letters, "x\n", "y", "space").tokens == (120, 32, 121)


def test_a_continuation_without_tokens_is_an_error():
    with pytest.raises(UserError, match="'' adds no token to 'xy'"):
        encode_pair(Letters, "xy", "")


def text(num_context, num_continuation, mark=0):
    return TokenizedText(tuple(range(num_context)) + (50 + mark,) * num_continuation, num_context)


def test_contexts_are_cut_on_the_left_all_alike():
    group = fit([text(10, 2), text(10, 5, 1)], 12)
    assert group.num_cut == 3 and [one.num_context for one in group.texts] == [7, 7]
    assert group.texts[0].tokens == (3, 4, 5, 6, 7, 8, 9, 50, 50) and group.first == 7
    assert fit([text(7, 5)], 12).num_cut == 0 and len(fit([text(9, 12)], 12).texts[0].tokens) == 12


def test_what_cannot_be_cut_is_too_long():
    with pytest.raises(TooLongError, match=r"13 tokens, but the model's context holds 12 .*max_tokens=12"):
        fit([text(1, 1), text(1, 13)], 12)
    with pytest.raises(TooLongError, match=r"9 tokens, but the model's context holds 8 after its prefix of 4"):
        fit([text(1, 9)], 12, prefix_tokens=4)


@pytest.mark.parametrize(
    "lengths", [[(0, 2)], [(1, 8)], [(4, 1)], [(9, 8), (9, 3)], [(1, 2), (9, 3)], [(0, 8), (11, 1)]]
)
def test_a_filled_prefix_comes_before_every_continuation(lengths):
    group = fit([text(*one) for one in lengths], 12, prefix_tokens=4)
    for one, (_, num_continuation) in zip(group.texts, lengths, strict=True):
        assert group.num_filled + one.num_context >= 4 and group.num_filled + len(one.tokens) <= 12
        assert one.num_continuation == num_continuation
    assert set(group.lead) == {2} and group.num_filled == max(0, 4 - min(one.num_context for one in group.texts))


def test_common_prefix():
    assert common_prefix([[1, 2, 3], [1, 2], [1, 2, 4]]) == 2 and common_prefix([[1], [2]]) == 0
    assert common_prefix([[1, 2]]) == 2 and common_prefix(["abc", "abd"]) == 2
