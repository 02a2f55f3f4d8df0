"""Continue prompts of text; end texts before stop strings, even those that span several tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from smlp.errors import UserError
from smlp.inference.generation.beam import beam_search
from smlp.inference.generation.prompts import Text, ready_prompts
from smlp.inference.generation.sampled import sampled_texts
from smlp.inference.generation.settings import BeamSearch, Limits, Sampling
from smlp.nn.decoder import Decoder
from smlp.text.tokenizer import Tokenizer, Vocabulary, check_characters
from smlp.text.tokenizer_files import FILLER


class StopStrings:
    """Pass text on piece by piece, up to the stop string that is completed first.

    Text that may be the beginning of a stop string is held back until that is decided.

    Raises:
        UserError: a stop string is empty, not a string, or not Unicode text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str):
                raise UserError(f"a stop string must be a string, got {stop!r:.80}")
            check_characters(stop)
        if not all(stops):
            raise UserError("a stop string must not be empty: every text would end at once")
        self._stops = tuple(stops)
        self._held = ""
        #: whether one of the strings has occurred
        self.found = False

    def push(self, piece: str) -> str:
        """Take the next piece of text; return what is certain to come before every stop string."""
        held = self._held + piece
        # the string completed first counts, so that the result does not depend on how the text is split
        complete = [(place + len(stop), place) for stop in self._stops if (place := held.find(stop)) >= 0]
        if complete:
            self.found, self._held = True, ""
            return held[: min(complete)[1]]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def rest(self) -> str:
        """Return the text that is still held back, for a text that ends here."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that ``stop`` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


#: number of batches whose prompts are sorted by length, so that prompts of a batch have similar lengths
BATCHES_AHEAD = 8
#: continuations of a prompt generated in one batch
_MAX_RETURN = 2**16


def banned_tokens(vocabulary: Vocabulary) -> list[int]:
    """Return the ids that are never written: ``<s>``, padding, unknown, and fairseq's filler symbols."""
    fillers = [token for symbol, token in vocabulary.index.items() if symbol.startswith(FILLER)]
    return [vocabulary.bos, vocabulary.pad, vocabulary.unk, *fillers]


@dataclass(frozen=True)
class Continuation:
    """One continuation of a prompt."""

    prompt: str
    #: number of the prompt, counted from 0
    index: int
    #: number among the continuations of the prompt, counted from 0; in beam search by rank
    draw: int
    #: without the prompt, the stop string and the ``</s>`` that ended it
    text: str
    #: new ids, with those of the stop string and with the ``</s>`` that ended it
    tokens: list[int]
    #: natural logarithm of the model's probability of each of them
    log_probs: list[float]
    #: reason for its end: "length", "end" (``</s>``), "stop" (a stop string) or "context" (no position is left)
    finish: str
    #: ranking score of beam search; None for sampled texts
    score: float | None = None
    #: tokens at the start of the prompt that were discarded by a sliding context
    num_cut_tokens: int = 0

    @property
    def log_prob(self) -> float:
        """Sum of the log-probabilities."""
        return sum(self.log_probs)


class ShownText:
    """Decide how much of a growing text can be shown."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], end: int | None, before: int) -> None:
        self._decoder = tokenizer.decoder(before)
        self._stops = StopStrings(stops)
        self._end = end

    def follow(self, text: Text) -> str:
        """Return what to show after the text's last token; set its ``finish`` at a stop string."""
        token = text.tokens[-1]
        piece = "" if token == self._end else self._decoder.push(token)
        if token == self._end or text.finish is not None:
            piece += self._decoder.rest()
        new = self._stops.push(piece)
        if self._stops.found:
            text.finish = "stop"
        elif text.finish is not None:
            new += self._stops.rest()
        return new


@dataclass(frozen=True)
class TextWriter:
    """Continues prompts in one way.

    Raises:
        UserError: settings cannot be combined.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    #: id that begins every prompt
    start_token: int
    method: Sampling | BeamSearch
    limits: Limits
    #: a text ends before any of these strings
    stop: Sequence[str] = ()
    #: continuations of each prompt
    num_return: int = 1
    #: whether start symbols are put before a prompt that is too short for a model with partial routing
    fill_prefix: bool = False

    def __post_init__(self) -> None:
        StopStrings(self.stop)
        if not isinstance(self.method, Sampling | BeamSearch):
            raise UserError(f"method must be a Sampling or a BeamSearch, got {self.method!r:.80}")
        if not isinstance(self.num_return, int) or not 1 <= self.num_return <= _MAX_RETURN:
            raise UserError(f"num_return must be from 1 to {_MAX_RETURN}, got {self.num_return!r}")
        if not self._searches:
            if self.num_return > 1 and self.method.temperature == 0:
                raise UserError(f"num_return={self.num_return} texts of greedy decoding would all be the same")
        elif self.method.size >= len(self.tokenizer.vocabulary):
            raise UserError(
                f"beam={self.method.size} must be below the {len(self.tokenizer.vocabulary)} symbols of the dictionary"
            )
        elif self.num_return > self.method.size:
            raise UserError(
                f"num_return={self.num_return} is more than the beam={self.method.size} texts that a search finds"
            )
        elif self.stop:
            raise UserError("stop strings cannot be combined with beam search, which ends texts at </s>")
        elif self.limits.when_full == "slide":
            raise UserError("sliding cannot be combined with beam search, which compares texts in one context")

    def settings(self) -> dict[str, Any]:
        """Return all settings by name, for reports."""
        return {
            "method": "beam search" if self._searches else "sampling",
            **asdict(self.method),
            **asdict(self.limits),
            "stop": list(self.stop),
            "num_return": self.num_return,
            "fill_prefix": self.fill_prefix,
        }

    def prompt_tokens(self, prompt: str) -> list[int]:
        """Return the ids of a prompt, start symbol first; a line break is ``</s>``, as when it is written."""
        return [self.start_token, *self.tokenizer.encode_lines(prompt)]

    def follow(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[Text, str]]:
        """Sample continuations of prompts of ids; yield each text as it grows, with what to show next.

        Prompts that do not fit are refused at once, before the iterator is read.

        Raises:
            UserError: as :func:`smlp.inference.generation.sampled_texts`; or a beam search, which shows no text early.
        """
        if self._searches:
            raise UserError("a beam search has no text before its end, so it cannot be followed: use sampling")
        texts = sampled_texts(
            self.decoder, prompts, self.limits, self.method, self.num_return, self._banned, self._fill
        )
        return self._with_shown(texts, prompts)

    def continuations(self, prompts: Sequence[str], batch_size: int) -> Iterator[list[Continuation]]:
        """Return the continuations of each prompt, in order; ``batch_size`` prompts are processed at a time.

        Prompts that do not fit are refused at once, before the iterator is read.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UserError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
            raise UserError(f"prompts must be a list of strings, got {prompts!r:.80}")
        prompts = list(prompts)
        tokens = [self.prompt_tokens(prompt) for prompt in prompts]
        return self._in_batches(prompts, tokens, self.num_cut(tokens), batch_size)

    def num_cut(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return how many tokens a sliding context cuts from the beginning of each prompt of ids.

        Raises:
            UserError: a prompt does not fit.
        """
        ready = ready_prompts(self.decoder.config, prompts, self.limits, self._fill, reads_last=self._searches)
        return [prompt.num_cut for prompt in ready]

    @property
    def _searches(self) -> bool:
        return isinstance(self.method, BeamSearch)

    @property
    def _fill(self) -> int | None:
        return self.start_token if self.fill_prefix else None

    @cached_property
    def _banned(self) -> list[int]:
        return banned_tokens(self.tokenizer.vocabulary)

    def _with_shown(self, texts: Iterator[Text], prompts: Sequence[Sequence[int]]) -> Iterator[tuple[Text, str]]:
        shown: dict[tuple[int, int], ShownText] = {}
        for text in texts:
            key = text.prompt, text.draw
            if key not in shown:
                shown[key] = ShownText(self.tokenizer, self.stop, self.limits.end, prompts[text.prompt][-1])
            yield text, shown[key].follow(text)

    def _in_batches(
        self, prompts: Sequence[str], tokens: list[list[int]], num_cut: list[int], batch_size: int
    ) -> Iterator[list[Continuation]]:
        window = batch_size * BATCHES_AHEAD
        for start in range(0, len(prompts), window):
            order = sorted(range(start, min(start + window, len(prompts))), key=lambda index: len(tokens[index]))
            done: dict[int, list[Continuation]] = {}
            coming = start
            for first in range(0, len(order), batch_size):
                batch = order[first : first + batch_size]
                done |= {index: [] for index in batch}
                for text, shown in self.finished([tokens[index] for index in batch]):
                    index = batch[text.prompt]
                    written = (text.tokens, text.log_probs, text.finish, text.score, num_cut[index])
                    done[index].append(Continuation(prompts[index], index, text.draw, shown, *written))
                while coming in done:
                    yield sorted(done.pop(coming), key=lambda continuation: continuation.draw)
                    coming += 1

    def finished(self, batch: Sequence[Sequence[int]]) -> Iterator[tuple[Text, str]]:
        """Yield each finished text of prompts of ids, with its string, in no particular order."""
        if self._searches:
            found = beam_search(self.decoder, batch, self.limits, self.method, self._banned, self._fill)
            for text in (text for texts in found for text in texts[: self.num_return]):
                decoder = self.tokenizer.decoder(batch[text.prompt][-1])
                yield text, "".join(map(decoder.push, text.tokens[:-1])) + decoder.rest()
            return
        shown: dict[tuple[int, int], str] = {}
        for text, new in self.follow(batch):
            key = text.prompt, text.draw
            shown[key] = shown.get(key, "") + new
            if text.finish is not None:
                yield text, shown.pop(key)
