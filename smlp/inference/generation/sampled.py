"""Sampling: texts that are drawn token by token.

Letters: ``R`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smlp.errors import NaNError, UserError
from smlp.inference.generation.prompts import Prompt, SharedPositions, Text, banned_ids, ready_prompts
from smlp.inference.generation.settings import Limits, Sampling
from smlp.nn.decoder import Decoder


def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling | None = None,
    banned: Sequence[int] = (),
    fill: int | None = None,
    when_full: str = "refuse",
) -> Iterator[int]:
    """Continue one sequence of ids; yield each new id as it is chosen.

    Arguments and errors as in :func:`sampled_texts`; ``max_tokens`` ids are yielded, or fewer with
    ``when_full="stop"``, at the end of the context.
    """
    if getattr(getattr(decoder, "config", None), "is_bidirectional", True):  # also of a compiled one
        raise UserError(f"ids are continued by a decoder, such as load_pretrained(PATH).decoder, got {decoder!r:.80}")
    limits = Limits(max_tokens, when_full=when_full)
    texts = sampled_texts(decoder, [prompt], limits, sampling, banned=banned, fill=fill)
    return (text.tokens[-1] for text in texts)


def sampled_texts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling | None = None,
    num_return: int = 1,
    banned: Sequence[int] = (),
    fill: int | None = None,
) -> Iterator[Text]:
    """Continue sequences of ids side by side; yield a text each time that a token is added to it.

    Each step costs one row of the spatial weights for each layer; no earlier token is computed again, except after a
    slide, when the kept half is read once. A prompt is read once for all its texts. A text leaves the batch when its
    ``finish`` is set: here, or by the caller as soon as it is yielded. It does not depend on the others, apart from
    rounding; it does where ``eval_capacity_factor`` limits the capacity of experts.

    Args:
        decoder: put in evaluation mode by the caller.
        prompts: ids, at least one each (fairseq's models start with ``</s>``).
        limits: when a text ends.
        sampling: how to choose; by default from the full distribution.
        num_return: texts of each prompt, with random numbers of their own.
        banned: ids that are never chosen, such as padding.
        fill: see :func:`smlp.inference.generation.prompts.ready_prompts`.

    Raises:
        UserError: a prompt that the model cannot read, a text that its context has no room for, or no text to write;
            before anything is computed.
        NaNError: the model's logits are NaN or infinite.
    """
    if num_return < 1:
        raise UserError(f"num_return must be at least 1, got {num_return}")
    sampling = sampling or Sampling()
    ready = ready_prompts(decoder.config, prompts, limits, fill)
    batch = SampledBatch(decoder, [Request(prompt, limits, sampling, num_return) for prompt in ready], banned)
    return batch.texts()


@dataclass(frozen=True)
class Request:
    """A request to continue one prompt."""

    prompt: Prompt
    limits: Limits
    sampling: Sampling
    #: texts, with random numbers of their own
    num_return: int = 1
    #: likeliest ids that are noted at each token
    num_top: int = 0


@dataclass
class _Draft:
    """A row of the batch: the text so far, and what was requested."""

    text: Text
    request: Request
    #: random numbers of the text; None while the prompt is still being read
    stream: torch.Generator | None = None


class SampledBatch:
    """Texts that grow side by side, each as its own request says; otherwise as in :func:`sampled_texts`.

    Args:
        decoder: put in evaluation mode by the caller.
        requests: a text's ``prompt`` is the number of its request.
        banned: ids that are never chosen.
    """

    def __init__(self, decoder: Decoder, requests: Sequence[Request], banned: Sequence[int] = ()) -> None:
        self._drafts = [_Draft(Text(number), request) for number, request in enumerate(requests)]
        prompts = [request.prompt for request in requests]
        capacity = max((len(prompt.tokens) + prompt.room - 1 for prompt in prompts), default=0)
        self._positions = SharedPositions(decoder, [prompt.tokens for prompt in prompts], capacity)
        self._banned = banned_ids(decoder.config, banned)

    @property
    def num_texts(self) -> int:
        """Return how many texts are growing."""
        return sum(draft.request.num_return if draft.stream is None else 1 for draft in self._drafts)

    def texts(self) -> Iterator[Text]:
        """Yield a text each time that a token is added to it, until all are finished."""
        while self._drafts:
            yield from self.step()

    def leave_out(self, requests: Collection[int]) -> None:
        """Drop all texts of some requests, by their numbers, whether their prompts have been read or not."""
        kept = [row for row, draft in enumerate(self._drafts) if draft.text.prompt not in requests]
        self._positions.keep(kept)
        self._drafts = [self._drafts[row] for row in kept]

    def step(self) -> Iterator[Text]:
        """Add a token to every text whose prompt has been read; yield them, and then drop those with a ``finish``."""
        if not self._drafts:
            return
        waiting, tokens, log_probs, logits_WV, log_total_W = self._next()
        batch, drafts = self._positions, self._drafts
        for place, (row, token, log_prob) in enumerate(zip(waiting, tokens, log_probs, strict=True)):
            draft = drafts[row]
            batch.rows[row].append(token)
            draft.text.tokens.append(token)
            draft.text.log_probs.append(log_prob)
            if draft.request.num_top:
                draft.text.top.append(likeliest(logits_WV[place] - log_total_W[place], draft.request.num_top))
            if token == draft.request.limits.end:
                draft.text.finish = "end"
            elif len(draft.text.tokens) == draft.request.prompt.room:
                draft.text.finish = draft.request.prompt.finish
            yield draft.text
        unfinished = [row for row, draft in enumerate(drafts) if draft.text.finish is None]
        batch.keep(unfinished)
        self._drafts = [drafts[row] for row in unfinished]

    @torch.no_grad()  # not around a generator: one that is left unfinished would be closed after torch, and fail
    def _next(self) -> tuple[list[int], list[int], list[float], Tensor, Tensor]:
        """Choose the next token of the rows whose prompts have been read.

        Returns:
            These rows, their tokens and the tokens' log-probabilities; the logits (W, V), and their logsumexp (W,).
        """
        batch = self._positions
        last_RH = batch.read()[:, -1]
        index = self._branch()
        drafts = self._drafts
        last_RH = last_RH[torch.tensor(index, device=last_RH.device)]
        waiting = batch.waiting
        logits_WV = batch.decoder.project(last_RH[torch.tensor(waiting, device=last_RH.device)]).float()
        log_total_W = logits_WV.logsumexp(1)
        check_numbers(log_total_W)
        tokens = self._chosen(self._adjusted(logits_WV), [drafts[row] for row in waiting])
        rows = torch.arange(len(waiting), device=logits_WV.device)
        log_probs = (logits_WV[rows, torch.tensor(tokens, device=logits_WV.device)] - log_total_W).tolist()
        return waiting, tokens, log_probs, logits_WV, log_total_W

    def _branch(self) -> list[int]:
        """Make ``num_return`` rows of each row whose prompt has just been read; return the row that each comes from."""
        waiting = set(self._positions.waiting)
        index, branched = [], []
        for row, draft in enumerate(self._drafts):
            if draft.stream is not None or row not in waiting:
                index.append(row)
                branched.append(draft)
                continue
            request = draft.request
            for draw in range(request.num_return):
                index.append(row)
                stream = random_stream(request.sampling.seed, request.prompt.tokens, draw)
                branched.append(_Draft(Text(draft.text.prompt, draw), request, stream))
        self._positions.keep(index)
        self._drafts = branched
        return index

    def _adjusted(self, logits_WV: Tensor) -> Tensor:
        """Return the logits of the waiting rows, with what may not be chosen at minus infinity."""
        logits_WV = logits_WV.clone()
        logits_WV[:, self._banned] = -torch.inf
        for logits_V, row in zip(logits_WV, self._positions.waiting, strict=True):
            request = self._drafts[row].request
            if request.sampling.repetition_penalty != 1:
                penalise(logits_V, self._positions.rows[row], request.sampling.repetition_penalty)
            end = request.limits.end
            if end is not None and len(self._drafts[row].text.tokens) < request.limits.min_tokens:
                logits_V[end] = -torch.inf
        return logits_WV

    @staticmethod
    def _chosen(logits_WV: Tensor, drafts: list[_Draft]) -> list[int]:
        """Return the next token of each waiting row."""
        alike: dict[Sampling, list[int]] = {}
        for place, draft in enumerate(drafts):
            alike.setdefault(replace(draft.request.sampling, seed=0), []).append(place)
        tokens = [0] * len(drafts)
        for sampling, places in alike.items():
            logits_RV = logits_WV if len(places) == len(drafts) else logits_WV[places]
            for place, token in zip(
                places, choose(logits_RV, sampling, [drafts[place].stream for place in places]), strict=True
            ):
                tokens[place] = token
        return tokens


def likeliest(log_probs_V: Tensor, count: int) -> list[tuple[int, float]]:
    """Return the ``count`` likeliest ids with their log-probabilities, likeliest first."""
    best = log_probs_V.topk(min(count, log_probs_V.numel()))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def random_stream(seed: int, prompt: Sequence[int], draw: int) -> torch.Generator:
    """Return the random numbers of one draw of a prompt, which depend on neither the batch nor other draws."""
    key = f"{seed} {draw} {' '.join(map(str, prompt))}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def check_numbers(scores_R: Tensor) -> None:
    """Refuse logits that cannot be chosen from, given a log-probability of each row, or its logsumexp.

    Raises:
        NaNError: some are NaN or infinite.
    """
    if not scores_R.isfinite().all():
        raise NaNError(
            "the model's next-token scores are NaN or infinite: the checkpoint has diverged or is damaged, or its "
            "numbers are too large for its data type"
        )


def penalise(logits_V: Tensor, tokens: Sequence[int], penalty: float) -> None:
    """Make ids that occur in ``tokens`` less likely, in place: see :attr:`Sampling.repetition_penalty`."""
    penalty = float(penalty)  # torch takes no whole numbers of more than 64 bits
    seen = torch.tensor(sorted(set(tokens)), device=logits_V.device)
    before = logits_V[seen]
    logits_V[seen] = torch.where(before > 0, before / penalty, before * penalty)


def choose(logits_RV: Tensor, sampling: Sampling, streams: Sequence[torch.Generator]) -> list[int]:
    """Return one token for each row of (R, V); ties between likeliest tokens go to the lowest id.

    A row takes one number from its own stream, so that its token does not depend on other rows.
    """
    if sampling.temperature == 0:
        return logits_RV.argmax(dim=1).tolist()
    logits_RV = logits_RV.double() / float(sampling.temperature)  # both penalty and temperature may be extreme
    if 0 < sampling.top_k < logits_RV.size(1):
        threshold_R1 = logits_RV.topk(sampling.top_k, dim=1).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < threshold_R1, -torch.inf)
    probabilities_RV = logits_RV.softmax(1)
    ids_RV = None
    if sampling.top_p < 1:
        probabilities_RV, ids_RV = probabilities_RV.sort(dim=1, descending=True, stable=True)
        before_RV = probabilities_RV.cumsum(1) - probabilities_RV
        probabilities_RV = probabilities_RV.masked_fill(before_RV >= sampling.top_p, 0.0)
    up_to_RV = probabilities_RV.cumsum(1)
    draws = [torch.rand(1, generator=stream, dtype=torch.float64) for stream in streams]
    # never draw beyond the last token with nonzero probability, however the sums are rounded
    aim_R1 = torch.stack(draws).to(up_to_RV.device) * up_to_RV[:, -1:]
    place_R1 = torch.searchsorted(up_to_RV, aim_R1, right=True)
    last_R1 = torch.searchsorted(up_to_RV, up_to_RV[:, -1:].contiguous())
    place_R1 = torch.minimum(place_R1, last_R1)
    chosen_R1 = place_R1 if ids_RV is None else ids_RV.gather(1, place_R1)
    return chosen_R1.flatten().tolist()
