"""Beam search with the semantics of fairseq's ``SequenceGenerator``.

At each step, the ``2 * size`` likeliest continuations of a prompt's hypotheses are ranked. Those of the first ``size``
that end with the end symbol are finished; the likeliest ``size`` of the others go on. A search is over when ``size``
hypotheses are finished, or when the longest length is reached, where all end. A score is the log-probability of the
whole text after the start symbol, prompt and end symbol included, divided by its number of tokens to the power of the
length penalty.

Letters: ``R`` rows, ``n`` tokens, ``V`` vocabulary, ``K`` candidates of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smlp.errors import UserError
from smlp.inference.generation.prompts import Prompt, SharedPositions, Text, banned_ids, ready_prompts
from smlp.inference.generation.sampled import check_numbers
from smlp.inference.generation.settings import BeamSearch, Limits
from smlp.nn.decoder import Decoder

#: positions of a prompt whose logits are computed at once
_POSITIONS = 128


@dataclass
class _Search:
    """The search for continuations of one prompt."""

    #: of the prompt, counted from 0
    number: int
    prompt: Prompt
    finished: list[Text] = field(default_factory=list)


@dataclass
class _Hypothesis:
    """A row of the batch: a text so far."""

    search: _Search
    #: log-probability of prompt and new tokens
    total: float = 0.0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Candidate:
    """A hypothesis with one more token."""

    row: int
    token: int
    log_prob: float
    total: float


@torch.no_grad()
def beam_search(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    beam: BeamSearch | None = None,
    banned: Sequence[int] = (),
    fill: int | None = None,
) -> list[list[Text]]:
    """Return the likeliest texts that were found for each prompt, best first; at most ``beam.size`` each.

    A text ends with ``limits.end``, which is counted in ``tokens`` besides the ``max_tokens`` others. With an empty
    prompt (the start symbol alone), the first token is never the end symbol.

    Args:
        decoder: put in evaluation mode by the caller.
        prompts: ids, at least one each, the start symbol first.
        limits: with the ``end`` symbol.
        beam: how to search.
        banned: ids that are never chosen; padding never is.
        fill: see :func:`smlp.inference.generation.prompts.ready_prompts`.

    Raises:
        UserError: a prompt that the model cannot read, a text that its context has no room for, no ``end``, or sliding.
        NaNError: the model's logits are NaN or infinite.
    """
    if limits.end is None:
        raise UserError("a beam search needs the id that ends a text: Limits(end=...)")
    if limits.when_full == "slide":
        raise UserError("a beam search cannot be combined with when_full=slide: it compares texts in one context")
    beam = beam or BeamSearch()
    ready = ready_prompts(decoder.config, prompts, limits, fill, reads_last=True)
    searches = [_Search(number, prompt) for number, prompt in enumerate(ready)]
    capacity = max((len(prompt.tokens) + prompt.room for prompt in ready), default=0)
    batch = SharedPositions(decoder, [prompt.tokens for prompt in ready], capacity)
    rows = [_Hypothesis(search) for search in searches]
    banned = sorted({*banned_ids(decoder.config, banned), decoder.config.padding_idx})
    if limits.end in banned:
        raise UserError(f"a beam search needs the id that ends a text, {limits.end}, and it is padding or in banned")
    while rows:
        hidden_RnH = batch.read()
        _add_prompt_scores(batch, rows, hidden_RnH)
        candidates = _candidates(batch, rows, hidden_RnH[:, -1], limits, beam, banned)
        going_on: list[tuple[int, _Candidate | None]] = []
        for search, group in itertools.groupby(range(len(rows)), key=lambda row: rows[row].search.number):
            own = list(group)
            if own[0] in candidates:
                best = sorted((c for row in own for c in candidates[row]), key=lambda c: -c.total)[: 2 * beam.size]
                going_on += [(c.row, c) for c in _advance(searches[search], rows, best, limits.end, beam)]
            else:  # its prompt is not fully read yet
                going_on += [(row, None) for row in own]
        batch.keep([row for row, _ in going_on])
        rows = [rows[row] if candidate is None else _extended(rows[row], candidate) for row, candidate in going_on]
        for ids, (_, candidate) in zip(batch.rows, going_on, strict=True):
            if candidate is not None:
                ids.append(candidate.token)
    return [_ranked(search) for search in searches]


def _add_prompt_scores(batch: SharedPositions, rows: list[_Hypothesis], hidden_RnH: Tensor) -> None:
    """Add the log-probabilities of the prompts' tokens that the hidden states of the tokens just read predict."""
    first = batch.num_read - hidden_RnH.size(1) + 1
    for row, hypothesis in enumerate(rows):
        known = hypothesis.search.prompt.tokens[first : batch.num_read + 1]
        # in pieces: logits of whole prompts are large
        for start in range(0, len(known), _POSITIONS):
            target_n1 = torch.tensor(known[start : start + _POSITIONS], device=hidden_RnH.device).unsqueeze(1)
            logits_nV = batch.decoder.project(hidden_RnH[row, start : start + len(target_n1)]).float()
            log_probs_n1 = logits_nV.log_softmax(1).gather(1, target_n1)
            check_numbers(log_probs_n1)
            hypothesis.total += float(log_probs_n1.double().sum())


def _candidates(
    batch: SharedPositions,
    rows: list[_Hypothesis],
    last_RH: Tensor,
    limits: Limits,
    beam: BeamSearch,
    banned: list[int],
) -> dict[int, list[_Candidate]]:
    """Return the likeliest next tokens of each row that waits for one."""
    waiting = batch.waiting
    logits_WV = batch.decoder.project(last_RH[torch.tensor(waiting, device=last_RH.device)]).float()
    log_probs_WV = logits_WV.log_softmax(1)
    check_numbers(log_probs_WV.amax(1))
    log_probs_WV[:, banned] = -torch.inf
    for place, row in enumerate(waiting):
        num_new, prompt = len(rows[row].tokens), rows[row].search.prompt
        if num_new == prompt.room:
            end = log_probs_WV[place, limits.end].clone()
            log_probs_WV[place] = -torch.inf
            log_probs_WV[place, limits.end] = end
        elif num_new < limits.min_tokens or (prompt.is_empty and num_new == 0):
            log_probs_WV[place, limits.end] = -torch.inf
    best = log_probs_WV.topk(min(2 * beam.size, log_probs_WV.size(1)), dim=1)
    found = {}
    for row, log_probs, tokens in zip(waiting, best.values.tolist(), best.indices.tolist(), strict=True):
        found[row] = [
            _Candidate(row, token, log_prob, rows[row].total + log_prob)
            for token, log_prob in zip(tokens, log_probs, strict=True)
            if log_prob > -torch.inf
        ]
    return found


def _advance(
    search: _Search, rows: list[_Hypothesis], best: list[_Candidate], end: int, beam: BeamSearch
) -> list[_Candidate]:
    """Finish hypotheses; return those that go on, none where the search is over."""
    going_on = []
    for rank, candidate in enumerate(best):
        if candidate.token != end:
            going_on.append(candidate)
        elif rank < beam.size and len(search.finished) < beam.size:
            ended = _extended(rows[candidate.row], candidate)
            length = len(search.prompt.tokens) - 1 + len(ended.tokens)
            finish = search.prompt.finish if len(ended.tokens) > search.prompt.room else "end"
            score = ended.total / length**beam.length_penalty
            search.finished.append(Text(search.number, 0, ended.tokens, ended.log_probs, [], score, finish))
    return [] if len(search.finished) == beam.size else going_on[: beam.size]


def _extended(hypothesis: _Hypothesis, candidate: _Candidate) -> _Hypothesis:
    return _Hypothesis(
        hypothesis.search,
        candidate.total,
        [*hypothesis.tokens, candidate.token],
        [*hypothesis.log_probs, candidate.log_prob],
    )


def _ranked(search: _Search) -> list[Text]:
    texts = sorted(search.finished, key=lambda text: -text.score)
    for rank, text in enumerate(texts):
        text.draw = rank
    return texts
