"""Log-probabilities of the tokens of texts, as candidates of a choice or on their own.

The beginning that the candidates of a group share is read once; then each continues from a copy of that state
(:mod:`smlp.inference.scoring.batching`). Padding stands on the right only.

Letters: ``R`` rows of logits at a time (in ``_block``: candidates of a block), ``n`` tokens, ``N`` positions of one
pass, ``K`` scored positions, ``H`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smlp.errors import NaNError, UserError
from smlp.evaluation.perplexity import of_nats
from smlp.inference.scoring.batching import CandidateBatch, CandidateBlock, Reading, plan_batches, plan_single_passes
from smlp.inference.scoring.texts import Candidates, Encoding
from smlp.moe.layer import TokenMoE
from smlp.nn.decoder import Decoder
from smlp.nn.state import DecodingState

#: fixed cost of a block, as the number of positions that take as long
_BLOCK_ON_CPU, _BLOCK_ON_GPU = 10, 1024


@dataclass(frozen=True)
class TokenScores:
    """Scores of the last ``s`` tokens of a text; those before are the same for all candidates, or only choose
    experts."""

    #: natural log-probabilities, (s,) float64
    log_probs: np.ndarray
    #: whether no other token is more likely, (s,)
    is_greedy: np.ndarray


class CandidateScorer:
    """Scores groups of candidates with a decoder.

    Args:
        decoder: in evaluation mode, dropping no token, so that a score does not depend on what else is in a batch.
        share: whether to read common beginnings once; off for a model with leaky routing, whose beginnings depend on
            what follows them, and where experts are spread over ranks, which must make equally many passes.
    """

    def __init__(self, decoder: Decoder, share: bool = True) -> None:
        self.decoder = decoder
        self.in_step = is_spread(decoder)
        self.share = share and not decoder.config.is_leaky and not self.in_step

    def plan(self, groups: Sequence[Candidates], batch_tokens: int) -> list[CandidateBatch]:
        """Return batches in which to score the groups; they do not depend on which rank scores them. See
        :func:`smlp.inference.scoring.batching.plan_batches`."""
        block_tokens = _BLOCK_ON_CPU if self._device.type == "cpu" else _BLOCK_ON_GPU
        plan = plan_single_passes if self.in_step else plan_batches
        return plan([self._reading(group) for group in groups], batch_tokens, block_tokens)

    @torch.inference_mode()
    def score_nothing(self) -> None:
        """Pass an empty batch through this rank's experts, while the other ranks :meth:`score` batches of theirs."""
        self.decoder.features(self._ids([[0]])[:0])

    @torch.inference_mode()
    def score(self, groups: Sequence[Candidates], batch: CandidateBatch) -> list[list[TokenScores]]:
        """Return the scores of every candidate of the groups of a batch, in its order.

        Positions of the model's prefix predict nothing, so tokens there are left out of the scores.

        Args:
            groups: all those for which the batch was planned.
            batch: one of :meth:`plan`.
        """
        members = [groups[place] for place in batch.members]
        readings = [self._reading(group) for group in members]
        states = self._read_beginnings(readings, batch)
        found: dict[tuple[int, int], TokenScores] = {}
        for blocks in batch.passes:
            going_on = [self._block(readings, batch, block, states) for block in blocks]
            features_NH = self.decoder.features_of(going_on)
            shapes = [tokens_Rn.shape for tokens_Rn, _ in going_on]
            rows = [row for block in blocks for row in block.rows]
            found.update(zip(rows, self._scores(features_NH, members, batch, blocks, shapes), strict=True))
        return [[found[member, number] for number in range(len(group.texts))] for member, group in enumerate(members)]

    def score_within_memory(
        self, groups: Sequence[Candidates], batch: CandidateBatch, batch_tokens: int
    ) -> list[list[TokenScores]]:
        """Call :meth:`score` on a batch that was planned with ``batch_tokens``.

        Raises:
            UserError: the batch does not fit into memory.
        """
        try:
            return self.score(groups, batch)
        except torch.OutOfMemoryError:
            raise UserError(
                f"a batch of {len(batch.members)} examples does not fit into memory: lower --batch-tokens "
                f"(now {batch_tokens})"
            ) from None

    def each(self, groups: Sequence[Candidates], batch_tokens: int) -> Iterator[tuple[int, list[TokenScores]]]:
        """Yield the place and scores of every group, batch by batch.

        Raises:
            UserError: a batch does not fit into memory.
        """
        for batch in self.plan(groups, batch_tokens):
            yield from zip(batch.members, self.score_within_memory(groups, batch, batch_tokens), strict=True)

    def _reading(self, group: Candidates) -> Reading:
        return Reading.of(group, self.share)

    def _read_beginnings(self, readings: Sequence[Reading], batch: CandidateBatch) -> list[DecodingState | None]:
        """Return the state after each beginning; None where nothing is shared."""
        states = [DecodingState(one.num_shared) if one.num_shared else None for one in batch.beginnings]
        reading = [
            (self._ids([readings[group].inputs[0][: one.num_shared] for group in one.groups]), state)
            for one, state in zip(batch.beginnings, states, strict=True)
            if state is not None
        ]
        if reading:
            self.decoder.read(reading)
        return states

    def _block(
        self,
        readings: Sequence[Reading],
        batch: CandidateBatch,
        block: CandidateBlock,
        states: Sequence[DecodingState | None],
    ) -> tuple[Tensor, DecodingState | None]:
        """Return the inputs with which a block's candidates continue, (R, n), and a state of their own."""
        beginning, state = batch.beginnings[block.beginning], states[block.beginning]
        inputs = [readings[member].inputs[number][beginning.num_shared :] for member, number in block.rows]
        width = max(map(len, inputs))
        if state is not None:
            places = torch.tensor([member - beginning.groups[0] for member, _ in block.rows], device=self._device)
            state = state.select(places, capacity=beginning.num_shared + width)
        padding = (self.decoder.config.padding_idx,) * width
        return self._ids([row + padding[len(row) :] for row in inputs]), state

    def _ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=self._device)

    def _scores(
        self,
        features_NH: Tensor,
        groups: Sequence[Candidates],
        batch: CandidateBatch,
        blocks: Sequence[CandidateBlock],
        shapes: Sequence[torch.Size],
    ) -> Iterator[TokenScores]:
        """Return the scores of the candidates of blocks of these shapes (R, n), whose features follow one another."""
        prefix_tokens = self.decoder.config.prefix_tokens
        places, targets, sizes, start = [], [], [], 0
        for block, shape in zip(blocks, shapes, strict=True):
            num_shared = batch.beginnings[block.beginning].num_shared
            for member, number in block.rows:
                group = groups[member]
                tokens = group.texts[number].tokens
                first = min(max(group.first, prefix_tokens - group.num_filled), len(tokens))
                begin = start + group.num_filled + first - num_shared
                places += range(begin, begin + len(tokens) - first)
                targets += tokens[first:]
                sizes.append(len(tokens) - first)
                start += shape[1]
        log_probs, is_greedy = self._predict(features_NH, places, targets)
        ends = np.cumsum(sizes)[:-1]
        return map(TokenScores, np.split(log_probs, ends), np.split(is_greedy, ends))

    def _predict(
        self, features_NH: Tensor, places: Sequence[int], targets: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probabilities of targets at places, and whether each target is the likeliest one."""
        place_K = torch.tensor(places, dtype=torch.int64, device=self._device)
        targets_K = torch.tensor(targets, dtype=torch.int64, device=self._device)
        log_probs, is_greedy = [torch.zeros(0)], [torch.zeros(0, dtype=torch.bool)]
        for logits_RV, targets_R in logits_in_pieces(self.decoder, features_NH[place_K], targets_K):
            pieces = scored(logits_RV, targets_R)
            log_probs.append(pieces[0].cpu())
            is_greedy.append(pieces[1].cpu())
        log_probs_K = torch.cat(log_probs).double().numpy()
        check_log_probs(log_probs_K)
        return log_probs_K, torch.cat(is_greedy).numpy()

    @property
    def _device(self) -> torch.device:
        return self.decoder.embedding.weight.device


@dataclass(frozen=True)
class TextScore:
    """The log-probabilities of one text."""

    #: the text before the scored text
    context: str
    text: str
    #: ids of the text
    tokens: list[int]
    #: natural log-probability of each of them
    log_probs: list[float]
    #: whether greedy decoding would generate the text after its context
    is_greedy: bool
    #: tokens cut from the left of the context to make room
    num_cut: int

    @property
    def log_prob(self) -> float:
        """Log-probability of the whole text, in nats."""
        return sum(self.log_probs)

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return of_nats(-self.log_prob / len(self.log_probs))


def score_texts(
    decoder: Decoder, encoding: Encoding, pairs: Sequence[tuple[str, str]], batch_tokens: int = 8192
) -> list[TextScore]:
    """Return the scores of texts after their contexts, in order.

    Args:
        decoder: in evaluation mode; should drop no token.
        encoding: of its texts.
        pairs: contexts, which may be empty, and what follows them; a space between them may belong to either.
        batch_tokens: positions in a batch.

    Raises:
        UserError: a text is empty, or longer than the model's context, or begins within the prefix.
    """
    prefix_tokens = decoder.config.prefix_tokens
    alike: dict[tuple, list[int]] = {}
    alone = []
    for number, pair in enumerate(pairs):
        one = encoding.group([encoding.pair(*pair)])
        if one.begins_within(prefix_tokens):
            raise UserError(
                f"{pair[1]!r} begins within the first {prefix_tokens} positions, which only choose experts: give a "
                "longer context or fill the prefix"
            )
        alone.append(one)
        # contexts from which equally many tokens were cut still match
        alike.setdefault((pair[0], one.lead, one.num_cut), []).append(number)
    groups = [
        Candidates(tuple(alone[number].texts[0] for number in numbers), num_cut, lead)
        for (_, lead, num_cut), numbers in alike.items()
    ]
    found: dict[int, TextScore] = {}
    numbers_of = list(alike.values())
    for place, scored in CandidateScorer(decoder).each(groups, batch_tokens):
        for number, text, scores in zip(numbers_of[place], groups[place].texts, scored, strict=True):
            size = text.num_continuation
            found[number] = TextScore(
                *pairs[number],
                tokens=list(text.tokens[-size:]),
                log_probs=scores.log_probs[-size:].tolist(),
                is_greedy=bool(scores.is_greedy[-size:].all()),
                num_cut=groups[place].num_cut,
            )
    return [found[number] for number in range(len(pairs))]


# logits in memory at a time: 128 MiB in float32
_MOST_LOGITS = 2**25


def logits_in_pieces(decoder: Decoder, x_KH: Tensor, targets_K: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits (R, V) in float32 and their targets (R,), in order; nothing for K = 0.

    Args:
        decoder: with the output matrix.
        x_KH: final hidden states.
        targets_K: ids.
    """
    if not targets_K.numel():
        return
    num_rows = max(1, _MOST_LOGITS // decoder.config.vocab_size)
    for x_RH, targets_R in zip(x_KH.split(num_rows), targets_K.split(num_rows), strict=True):
        yield decoder.project(x_RH).float(), targets_R


def scored(logits_RV: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the natural log-probability of each target, (R,), and whether no token is likelier, (R,).

    The logits are used up: overwritten, because at a large vocabulary a second tensor of their size costs more than the
    arithmetic.
    """
    chosen_R = logits_RV.gather(1, targets_R.unsqueeze(1)).squeeze(1)
    largest_R = logits_RV.amax(dim=1)
    sum_R = logits_RV.sub_(largest_R.unsqueeze(1)).exp_().sum(dim=1)
    return chosen_R - largest_R - sum_R.log(), chosen_R == largest_R


def check_log_probs(log_probs_K: np.ndarray) -> None:
    """Raise ``NaNError`` if log-probabilities are NaN or infinite, as where float16 overflows."""
    if num_bad := int((~np.isfinite(log_probs_K)).sum()):
        raise NaNError(
            f"the model's predictions of {num_bad} tokens are NaN or infinite: the checkpoint has diverged or is "
            "damaged, or its numbers are too large for its data type"
        )


def is_spread(decoder: Decoder) -> bool:
    """Return whether other ranks hold experts of the model, so that all must make equally many forward passes."""
    return any(module.dispatcher.num_ranks > 1 for module in decoder.modules() if isinstance(module, TokenMoE))


def capacity_limits(decoder: Decoder) -> list[Callable[[float], None]]:
    """Return ``limit_capacity`` of each router that can drop tokens; none in models where every token finds its expert.

    Plug-ins may still call it by its former name, ``limit_places``.
    """
    routers = [module.router for module in decoder.modules() if isinstance(module, TokenMoE)]
    limits = [getattr(router, "limit_capacity", getattr(router, "limit_places", None)) for router in routers]
    return [limit for limit in limits if limit is not None]


def limit_capacity(decoder: Decoder, factor: float) -> None:
    """Set the capacity factor of evaluation in place; 0 drops nothing."""
    for limit in capacity_limits(decoder):
        limit(factor)


def drop_nothing(decoder: Decoder) -> None:
    """Let experts take every token in evaluation, whatever the model was trained with: a score must not depend on what
    else is in a batch."""
    limit_capacity(decoder, 0.0)
