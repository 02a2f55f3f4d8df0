"""A request to the completions endpoint, checked: OpenAI's keys, and some that other servers have too."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from smlp.config import ModelConfig
from smlp.errors import UserError
from smlp.inference.generation import Limits, Sampling
from smlp.inference.generation.continuations import StopStrings
from smlp.inference.generation.prompts import Prompt, ready_prompts
from smlp.text.tokenizer import Tokenizer, Vocabulary

#: as in OpenAI's interface
_MOST_STOPS, _MOST_LOGPROBS, _MOST_TEXTS = 4, 5, 128
_DEFAULT_TOKENS = 16
#: keys that are accepted only with a value that changes nothing
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "suffix": ("",),
}
_KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs", "echo"),
    *("stop", "seed", "user", "top_k", "repetition_penalty", "stop_at_eos", "fill_prefix", "best_of"),
    *_WITHOUT_EFFECT,
}


class RequestError(UserError):
    """A request that cannot be answered; ``name`` is the key at fault."""

    def __init__(self, name: str | None, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class RequestedPrompt:
    """A prompt of a request."""

    #: as the client gave it, or what its ids mean
    text: str
    #: ids, start symbol first
    tokens: list[int]
    #: with the room for new tokens; None if nothing is to be written
    ready: Prompt | None


@dataclass(frozen=True)
class CompletionRequest:
    """A request of a client."""

    prompts: list[RequestedPrompt]
    #: for each prompt; without a seed of the client's, random numbers differ
    samplings: list[Sampling]
    limits: Limits
    stop: tuple[str, ...]
    #: texts for each prompt
    num_texts: int
    #: likeliest tokens at each place, whose log-probabilities are wanted; None: no log-probabilities
    num_top: int | None
    echoes: bool
    streams: bool
    #: whether a stream ends with the numbers of tokens
    says_usage: bool


@dataclass(frozen=True)
class RequestReader:
    """Reads requests to one model."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    start_token: int
    most_tokens: int
    #: of a prompt
    most_texts: int
    #: of a request
    most_prompts: int

    def read(self, body: Any) -> CompletionRequest:
        """Check the body of a request.

        Raises:
            RequestError: something in it is wrong, or the model cannot read it; the message names the key.
        """
        if not isinstance(body, dict):
            raise RequestError(None, "the body must be a JSON object")
        given = {name: value for name, value in body.items() if value is not None}
        for name in given:
            if name not in _KNOWN:
                raise RequestError(name, f"unknown key {name[:80]!r}; there are {', '.join(sorted(_KNOWN))}")
        keys = _Keys(given)
        num_texts = keys.whole("n", 1, 1, min(_MOST_TEXTS, self.most_texts))
        for name, allowed in {**_WITHOUT_EFFECT, "best_of": (1, num_texts)}.items():
            if name in given and (given[name] not in allowed or isinstance(given[name], bool)):
                raise RequestError(name, f"{name} is not available here: leave it out")
        max_tokens = keys.whole("max_tokens", min(_DEFAULT_TOKENS, self.most_tokens), 0, self.most_tokens)
        echoes, streams = keys.flag("echo"), keys.flag("stream")
        num_top = keys.whole("logprobs", 0, 0, _MOST_LOGPROBS) if "logprobs" in given else None
        sampling = _with_name(
            None,
            lambda: Sampling(
                temperature=keys.number("temperature", 1.0),
                top_k=keys.whole("top_k", 0, 0, len(self.tokenizer.vocabulary)),
                top_p=keys.number("top_p", 1.0),
                repetition_penalty=keys.number("repetition_penalty", 1.0),
                seed=keys.whole("seed", 0, -(2**63), 2**63 - 1) % 2**63,
            ),
        )
        if num_texts > 1 and sampling.temperature == 0:
            raise RequestError("n", f"n={num_texts} texts of temperature 0 would all be the same")
        if max_tokens == 0 and not echoes:
            raise RequestError("max_tokens", "max_tokens=0 only scores the prompt, which needs echo")
        if streams and echoes:
            raise RequestError("stream", "stream and echo cannot be combined")
        options = given.get("stream_options", {})
        if not isinstance(options, dict) or set(options) - {"include_usage"}:
            raise RequestError("stream_options", "stream_options may only have include_usage")
        if options and not streams:
            raise RequestError("stream_options", "stream_options needs stream")
        says_usage = _Keys({name: value for name, value in options.items() if value is not None}).flag("include_usage")
        end = Vocabulary.eos if keys.flag("stop_at_eos") else None
        limits = Limits(max(max_tokens, 1), end=end, when_full="stop")
        fill = self.start_token if keys.flag("fill_prefix") else None
        asked = self._prompts(given.get("prompt"))
        if len(asked) > self.most_prompts:
            raise RequestError("prompt", f"{len(asked)} prompts: at most {self.most_prompts} in a request")
        prompts = [self._asked(prompt, limits if max_tokens else None, fill) for prompt in asked]
        seeds = [sampling.seed if "seed" in given else secrets.randbits(62) for _ in prompts]
        samplings = [replace(sampling, seed=seed) for seed in seeds]
        return CompletionRequest(
            prompts, samplings, limits, self._stops(given.get("stop")), num_texts, num_top, echoes, streams, says_usage
        )

    def _prompts(self, prompt: Any) -> list[str | list[int]]:
        """Return the list of prompts in a text, several texts, ids, or several lists of ids."""
        if prompt is None:
            raise RequestError("prompt", "prompt is missing")
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _are_ids(prompt)):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise RequestError("prompt", "prompt must be a text, ids, or a list of them that is not empty")
        if all(isinstance(one, int) for one in prompt):  # Python counts true and false as such
            wrong = next(one for one in prompt if not _are_ids([one]))
            raise RequestError("prompt", f"prompt must hold ids, got {wrong!r}")
        for one in prompt:
            if not isinstance(one, str) and not (isinstance(one, list) and _are_ids(one)):
                raise RequestError("prompt", f"prompt must hold texts or lists of ids, got {one!r:.80}")
        return prompt

    def _asked(self, prompt: str | list[int], limits: Limits | None, fill: int | None) -> RequestedPrompt:
        if isinstance(prompt, str):
            if (num_breaks := prompt.count("\n")) >= self.config.max_tokens:  # each line would be encoded by itself
                raise RequestError(
                    "prompt",
                    f"the prompt has {num_breaks} line breaks, each of them a token, and the model's context has "
                    f"{self.config.max_tokens}: give a shorter one",
                )
            text, ids = prompt, _with_name("prompt", lambda: self.tokenizer.encode_lines(prompt))
        else:
            text, ids = _with_name("prompt", lambda: self.tokenizer.decode(prompt)), prompt
        if self.config.padding_idx in ids:
            raise RequestError("prompt", f"prompt holds the id of padding, {self.config.padding_idx}")
        tokens = [self.start_token, *ids]
        if len(tokens) > self.config.max_tokens:
            raise RequestError(
                "prompt",
                f"the prompt has {len(tokens)} tokens (start symbol included), and the model's context has "
                f"{self.config.max_tokens}: give a shorter one",
            )
        if limits is None:
            return RequestedPrompt(text, tokens, None)
        (ready,) = _with_name("prompt", lambda: ready_prompts(self.config, [tokens], limits, fill))
        return RequestedPrompt(text, tokens, ready)

    @staticmethod
    def _stops(stop: Any) -> tuple[str, ...]:
        stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
        if not isinstance(stops, tuple | list):
            raise RequestError("stop", f"stop must be a text or a list of texts, got {stop!r:.80}")
        if len(stops) > _MOST_STOPS:
            raise RequestError("stop", f"stop has {len(stops)} texts: at most {_MOST_STOPS}")
        _with_name("stop", lambda: StopStrings(stops))
        return tuple(stops)


class _Keys:
    """Values by their names, each of its type and within its bounds."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        value = self._given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(name, f"{name} must be a whole number, got {value!r:.80}")
        if not least <= value <= most:
            raise RequestError(name, f"{name} must be from {least} to {most}, got {value!r:.80}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(name, f"{name} must be a number, got {value!r:.80}")
        try:
            return float(value)
        except OverflowError:
            raise RequestError(name, f"{name} is too large") from None

    def flag(self, name: str) -> bool:
        value = self._given.get(name, False)
        if not isinstance(value, bool):
            raise RequestError(name, f"{name} must be true or false, got {value!r:.80}")
        return value


def _are_ids(values: list[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _with_name(name: str | None, work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns; its errors are those of the key, by default of the one that they begin with."""
    try:
        return work()
    except RequestError:
        raise
    except UserError as error:
        raise RequestError(name or str(error).partition(" ")[0], str(error)) from None
    except UnicodeEncodeError:
        raise RequestError(name, f"{name} has a lone surrogate, which is not Unicode text") from None
