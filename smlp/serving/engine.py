"""Write the texts of concurrent requests side by side, in one thread.

The rows of a batch share their position, so that they are multiplied by the same spatial weights. A request that comes
while others are being written does not join them: it begins a batch with all that came with it, and the batches take
turns, a token each. A request waits for others to end only where no text or no batch more is allowed.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from smlp.errors import UserError, out_of_memory, unexpected
from smlp.inference.generation import Request, SampledBatch, ShownText, Text, likeliest
from smlp.inference.generation.sampled import check_numbers
from smlp.nn.decoder import Decoder
from smlp.text.tokenizer import Tokenizer

#: batches at a time; what comes meanwhile is gathered for the next one
_MOST_BATCHES = 4
#: seconds in which an idle engine gathers requests that come together
_GATHER = 0.005
#: positions whose logits are computed at once
_POSITIONS = 128


class BusyError(UserError):
    """Too many requests wait already."""


@dataclass(frozen=True)
class NewToken:
    """A token that was added to a text."""

    #: number of the text among those of its job, counted from 0
    draw: int
    token: int
    log_prob: float
    #: likeliest ids with their log-probabilities, as many as were asked for
    top: list[tuple[int, float]]
    #: text that is certain now: none after some tokens, that of several tokens after others
    shown: str
    #: why the text ended, if it did: as :attr:`smlp.inference.generation.Text.finish`
    finish: str | None


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens after the start symbol; None within a prefix, which is not predicted."""

    log_probs: list[float | None]
    top: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Failed:
    """The job cannot go on."""

    reason: str


Event = NewToken | PromptScores | Failed


@dataclass
class PromptJob:
    """One prompt of a client's request."""

    #: ids of the prompt, start symbol first
    prompt: Sequence[int]
    #: what to write; None if only the prompt is to be scored
    request: Request | None
    #: called with each event, in the engine's thread
    emit: Callable[[Event], None]
    stop: Sequence[str] = ()
    #: likeliest ids at each of the prompt's tokens, whose log-probabilities are wanted; None: they are not wanted
    prompt_top: int | None = None
    #: set by whoever does not want the texts any more
    is_cancelled: bool = False
    #: its texts, by their numbers, as far as they can be shown
    shown: dict[int, ShownText] = field(default_factory=dict)

    @property
    def num_texts(self) -> int:
        """Return how many rows it takes."""
        return 1 if self.request is None else self.request.num_return


class _Batch:
    """Jobs that began together."""

    def __init__(
        self, decoder: Decoder, jobs: Sequence[PromptJob], tokenizer: Tokenizer, banned: Sequence[int]
    ) -> None:
        self.jobs, self._tokenizer = jobs, tokenizer
        self._texts = SampledBatch(decoder, [job.request for job in self.jobs if job.request is not None], banned)

    @property
    def num_texts(self) -> int:
        return self._texts.num_texts

    def step(self) -> None:
        """Add a token to each text, and tell whoever asked for it; texts that nobody wants any more are left out."""
        self._texts.leave_out({number for number, job in enumerate(self.jobs) if job.is_cancelled})
        for text in self._texts.step():
            job = self.jobs[text.prompt]
            job.emit(self._told(job, text))

    def _told(self, job: PromptJob, text: Text) -> NewToken:
        if text.draw not in job.shown:
            end = job.request.limits.end if job.request else None
            job.shown[text.draw] = ShownText(self._tokenizer, job.stop, end, job.prompt[-1])
        new = job.shown[text.draw].follow(text)
        top = text.top[-1] if text.top else []
        return NewToken(text.draw, text.tokens[-1], text.log_probs[-1], top, new, text.finish)


class Engine:
    """Writes texts until it is closed.

    Args:
        decoder: in evaluation mode, with routers that drop nothing.
        tokenizer: of the model.
        banned: ids that are never chosen.
        most_texts: texts that are written at a time.
        most_waiting: jobs that may wait.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, banned: Sequence[int], most_texts: int, most_waiting: int
    ) -> None:
        self.decoder, self.tokenizer, self.most_texts = decoder, tokenizer, most_texts
        self._banned, self._most_waiting = banned, most_waiting
        self._waiting: deque[PromptJob] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._batches: list[_Batch] = []
        self._beginning: list[PromptJob] = []  # taken from those that wait, but not yet a batch
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[PromptJob]) -> None:
        """Queue jobs, all or none of them; if no job waits, any number of them.

        Raises:
            BusyError: too many wait already, or the engine is closed.
        """
        with self._changed:
            if self._is_closed:
                raise BusyError("the server is shutting down")
            waiting = [job for job in self._waiting if not job.is_cancelled]
            before, after = self._num_without_room(waiting), self._num_without_room([*waiting, *jobs])
            if before and after > self._most_waiting:
                raise BusyError(
                    f"{before} prompts are waiting, and {after - before} more would exceed {self._most_waiting}: try "
                    "later"
                )
            self._waiting.extend(jobs)
            self._changed.notify()

    def close(self) -> None:
        """Stop; jobs that are not done fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def state(self) -> dict[str, int]:
        """Return how many texts are being written and how many prompts wait."""
        with self._changed:
            return {"writing": self._num_writing, "waiting": sum(not job.is_cancelled for job in self._waiting)}

    def _num_without_room(self, jobs: Sequence[PromptJob]) -> int:
        """Return how many of these jobs have to wait; call with the lock held."""
        texts = itertools.accumulate(job.num_texts for job in jobs)
        num_batches = len(self._batches) + bool(self._beginning)
        free = self.most_texts - self._num_writing if num_batches < _MOST_BATCHES else 0
        return sum(number > free for number in texts)

    @property
    def _num_writing(self) -> int:
        return sum(batch.num_texts for batch in self._batches) + sum(job.num_texts for job in self._beginning)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._batches or self._is_closed):
                    self._changed.wait()
                if not self._batches and not self._is_closed:
                    self._changed.wait_for(lambda: self._is_closed, _GATHER)
                if self._is_closed:
                    break
                jobs = self._beginning = self._admitted()
            batches = [*self._batches, *self._begun(jobs)]
            left = [batch for batch in batches if self._guarded(batch.jobs, batch.step) and batch.num_texts]
            with self._changed:
                self._batches, self._beginning = left, []
        for job in [*self._waiting, *(job for batch in self._batches for job in batch.jobs)]:
            job.emit(Failed("the server is shutting down"))

    def _admitted(self) -> list[PromptJob]:
        """Take from the queue what there is room for, in order; call with the lock held."""
        free = self.most_texts - self._num_writing
        jobs: list[PromptJob] = []
        while self._waiting and len(self._batches) < _MOST_BATCHES:
            if self._waiting[0].is_cancelled:
                self._waiting.popleft()
                continue
            free -= self._waiting[0].num_texts
            if free < 0:
                break
            jobs.append(self._waiting.popleft())
        return jobs

    def _begun(self, jobs: list[PromptJob]) -> list[_Batch]:
        """Score prompts where that is asked for; return the batch of the texts, if any is to be written."""
        for job in jobs:
            if job.prompt_top is not None:
                self._guarded([job], partial(self._score, job, job.prompt_top))
        written = [job for job in jobs if job.request is not None and not job.is_cancelled]
        batches: list[_Batch] = []
        if written:
            self._guarded(written, lambda: batches.append(_Batch(self.decoder, written, self.tokenizer, self._banned)))
        return batches

    def _score(self, job: PromptJob, num_top: int) -> None:
        job.emit(prompt_scores(self.decoder, job.prompt, num_top))

    def _guarded(self, jobs: Sequence[PromptJob], work: Callable[[], None]) -> bool:
        """Do some of the work; if it fails, its jobs fail, and the engine goes on. Return whether it was done."""
        try:
            work()
        except Exception as error:  # of a plug-in, for example
            reason = str(error) if isinstance(error, UserError) else out_of_memory(error) or unexpected(error)
            for job in jobs:
                if not job.is_cancelled:
                    job.is_cancelled = True
                    job.emit(Failed(reason))
            return False
        return True


@torch.no_grad()
def prompt_scores(decoder: Decoder, prompt: Sequence[int], num_top: int) -> PromptScores:
    """Return the log-probability of each token of a prompt but the first, and the likeliest tokens in its place.

    Args:
        decoder: in evaluation mode.
        prompt: ids, at least two, at most one more than the model's context.
        num_top: likeliest tokens.
    """
    device = decoder.embedding.weight.device
    hidden_nH = decoder.features(torch.tensor([prompt[:-1]], device=device))[0][0]
    log_probs: list[float | None] = []
    top: list[list[tuple[int, float]]] = []
    for start in range(0, len(prompt) - 1, _POSITIONS):
        piece_nV = decoder.project(hidden_nH[start : start + _POSITIONS]).float().log_softmax(1)
        target_n1 = torch.tensor(prompt[start + 1 : start + 1 + len(piece_nV)], device=device).unsqueeze(1)
        log_probs_n1 = piece_nV.gather(1, target_n1)
        check_numbers(log_probs_n1)
        log_probs += log_probs_n1.flatten().tolist()
        top += [likeliest(log_probs_V, num_top) if num_top else [] for log_probs_V in piece_nV]
    unknown = min(decoder.config.prefix_tokens, len(log_probs))
    return PromptScores([None] * unknown + log_probs[unknown:], [[]] * unknown + top[unknown:])
