"""The endpoints: OpenAI's completions and models, a health check, and a page to try the model."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from smlp.inference.generation import Request
from smlp.serving.completion_request import CompletionRequest, RequestedPrompt, RequestError, RequestReader
from smlp.serving.engine import BusyError, Engine, Event, Failed, NewToken, PromptJob, PromptScores
from smlp.text.tokenizer import Tokenizer

MOST_BYTES = 4 << 20  # of a request
_LOOK = 0.2  # seconds between two looks at whether a client is still there
_SHOWN = 80  # most characters of an unknown key
_GONE = 499  # status for a client that will not read it, as nginx has it
_NOT_HERE = {
    "/v1/chat/completions": "these models only continue texts and do not chat: use /v1/completions",
    "/v1/embeddings": "embeddings are not available: use /v1/completions",
}
#: OpenAI's names of the reasons for which a text ended
_REASONS = {"end": "stop", "stop": "stop", "length": "length", "context": "length"}


def make_app(engine: Engine, reader: RequestReader, api_key: str | None = None) -> Starlette:
    """Return the application.

    Args:
        engine: writes the texts.
        reader: checks requests.
        api_key: what clients must send as ``Authorization: Bearer KEY``; None: nothing.
    """
    app = _App(engine, reader, api_key)
    routes = [
        Route("/", app.page),
        Route("/health", app.health),
        Route("/v1/models", app.models),
        Route("/v1/models/{name:path}", app.model),
        Route("/v1/completions", app.completions, methods=["POST"]),
        *(Route(path, app.not_here, methods=["GET", "POST"]) for path in _NOT_HERE),
    ]
    return Starlette(routes=routes, exception_handlers={404: _no_such_page, 405: _no_such_method, 500: _bug})


class _LogProbs:
    """Log-probabilities of tokens that follow one another, as OpenAI writes them.

    Args:
        tokenizer: of the model.
        before: the token before the first.
        offset: characters of the text before the first.
    """

    def __init__(self, tokenizer: Tokenizer, before: int, offset: int) -> None:
        self._tokenizer, self._before, self._offset = tokenizer, before, offset
        self._decoder = tokenizer.decoder(before)
        self.found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(
        self, token: int, log_prob: float | None, likeliest: list[tuple[int, float]], is_last: bool
    ) -> dict[str, list[Any]]:
        """Add a token and the likeliest ones in its place; return its part. None: the model predicts nothing there."""
        top: dict[str, float | None] = {}
        for other, its_log_prob in likeliest:
            top.setdefault(self._text_of(other), its_log_prob)  # of ids with one text, the likeliest
        if top:  # the token itself is always among them
            top.setdefault(self._text_of(token), log_prob)
        text = self._decoder.push(token)
        if is_last:
            text += self._decoder.rest()  # ids may end within a character
        values = (text, log_prob, top or None, self._offset)
        self._offset, self._before = self._offset + len(text), token
        part = {name: [value] for name, value in zip(self.found, values, strict=True)}
        for name, added in part.items():
            self.found[name] += added
        return part

    def _text_of(self, token: int) -> str:
        decoder = self._tokenizer.decoder(self._before)
        return decoder.push(token) + decoder.rest()


@dataclass
class _Choice:
    """A text as it grows."""

    #: the prompt, as the text begins with it; empty where it is not to be repeated
    echo: str
    #: None if they are not wanted
    logprobs: _LogProbs | None
    tokens: list[NewToken] = field(default_factory=list)
    finish: str | None = None


class _App:
    def __init__(self, engine: Engine, reader: RequestReader, api_key: str | None) -> None:
        self._engine, self._reader, self._api_key = engine, reader, api_key
        self._started = int(time.time())

    async def page(self, request: HttpRequest) -> Response:
        page = resources.files("smlp.serving").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": "default-src 'self' 'unsafe-inline'"})

    async def health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", **self._engine.state()})

    async def models(self, request: HttpRequest) -> Response:
        return self._refusal(request) or JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: HttpRequest) -> Response:
        refusal = self._refusal(request)
        if refusal is None and request.path_params["name"] != self._reader.name:
            return _error(404, f"there is no model {request.path_params['name']!r:.200}", "model", "model_not_found")
        return refusal or JSONResponse(self._described())

    async def not_here(self, request: HttpRequest) -> Response:
        return _error(404, _NOT_HERE[request.url.path])

    async def completions(self, request: HttpRequest) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        try:
            body = await _json_body(request)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        except RequestError as error:
            return _error(400, str(error), error.name)
        try:
            wanted = await asyncio.to_thread(self._reader.read, body)
            name = self._reader.name if body.get("model") is None else body["model"]
            if name != self._reader.name:
                message = f"there is no model {name!r:.200}; this server has {self._reader.name!r}"
                return _error(404, message, "model", "model_not_found")
            answer = _Answer(self._engine, self._reader, wanted)
            answer.begin()
        except RequestError as error:
            return _error(400, str(error), error.name)
        except BusyError as error:
            return _error(429, str(error), kind="rate_limit_error", headers={"Retry-After": "1"})
        if wanted.streams:
            return StreamingResponse(answer.stream(request), media_type="text/event-stream")
        return await answer.whole(request)

    def _refusal(self, request: HttpRequest) -> Response | None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = scheme.lower() == "bearer" and secrets.compare_digest(given.encode(), (self._api_key or "").encode())
        if self._api_key is None or is_right:
            return None
        return _error(401, "the API key is missing or wrong", code="invalid_api_key")

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._reader.name,
            "object": "model",
            "created": self._started,
            "owned_by": "smlp",
            "max_model_len": self._reader.config.max_tokens,
            "max_tokens": self._reader.most_tokens,
        }


class _Answer:
    """The texts of one request, as they come."""

    def __init__(self, engine: Engine, reader: RequestReader, wanted: CompletionRequest) -> None:
        self._engine, self._reader, self._wanted = engine, reader, wanted
        self._about = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": reader.name,
        }
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._look_at = time.monotonic() + _LOOK
        loop = asyncio.get_running_loop()

        def emitter(number: int) -> Any:
            def emit(event: Event) -> None:
                with suppress(RuntimeError):  # the server is shutting down
                    loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

            return emit

        self._choices = [self._choice(asked) for asked in wanted.prompts for _ in range(wanted.num_texts)]
        wants_scores = wanted.echoes and wanted.num_top is not None
        self._jobs = [
            PromptJob(
                asked.tokens,
                asked.ready and Request(asked.ready, wanted.limits, sampling, wanted.num_texts, wanted.num_top or 0),
                emitter(number),
                wanted.stop,
                wanted.num_top if wants_scores and len(asked.tokens) > 1 else None,
            )
            for number, (asked, sampling) in enumerate(zip(wanted.prompts, wanted.samplings, strict=True))
        ]
        #: number of events to come that end a choice or bring the scores of a prompt
        self._left = sum((job.num_texts if job.request else 0) + (job.prompt_top is not None) for job in self._jobs)

    def _choice(self, asked: RequestedPrompt) -> _Choice:
        echo = asked.text if self._wanted.echoes else ""
        wants_logprobs = self._wanted.num_top is not None
        return _Choice(echo, _LogProbs(self._reader.tokenizer, asked.tokens[-1], len(echo)) if wants_logprobs else None)

    def begin(self) -> None:
        """Submit the jobs to the engine.

        Raises:
            BusyError: too many prompts wait already.
        """
        if self._left:
            self._engine.submit(self._jobs)

    async def whole(self, request: HttpRequest) -> Response:
        """Return the answer when all texts are written; stop writing if the client goes away."""
        try:
            while self._left:
                found = await self._next(request)
                if found is None:
                    return Response(status_code=_GONE)
                number, event = found
                if isinstance(event, Failed):
                    return _error(500, event.reason, kind="server_error")
                self._take(number, event)
        finally:
            self._cancel()
        choices = [self._finished(index) for index in range(len(self._choices))]
        return JSONResponse({**self._about, "choices": choices, "usage": self._usage()})

    async def stream(self, request: HttpRequest) -> AsyncIterator[str]:
        """Yield server-sent events; stop writing if the client goes away."""
        try:
            while self._left:
                found = await self._next(request)
                if found is None:
                    return
                number, event = found
                if isinstance(event, Failed):
                    yield _sent({"error": _error_of(event.reason, None, None, "server_error")})
                    return
                for chunk in self._take(number, event):
                    yield _sent({**self._about, "choices": [chunk]})
            if self._wanted.says_usage:
                yield _sent({**self._about, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        finally:
            self._cancel()

    async def _next(self, request: HttpRequest) -> tuple[int, Event] | None:
        """Return the next event and its prompt's number; None if the client has gone away, which raises no error."""
        while True:
            if time.monotonic() >= self._look_at:
                if await request.is_disconnected():
                    return None
                self._look_at = time.monotonic() + _LOOK
            with suppress(TimeoutError):
                return await asyncio.wait_for(self._events.get(), _LOOK)

    def _take(self, number: int, event: Event) -> list[dict[str, Any]]:
        """Note what has happened to a prompt; return what a stream says of it."""
        first = number * self._wanted.num_texts
        if isinstance(event, PromptScores):
            prompt = self._wanted.prompts[number].tokens
            for choice in self._choices[first : first + self._wanted.num_texts]:
                choice.logprobs = _LogProbs(self._reader.tokenizer, prompt[0], 0)
                for place, known in enumerate(zip(prompt[1:], event.log_probs, event.top, strict=True), start=2):
                    choice.logprobs.add(*known, is_last=place == len(prompt))
                choice.echo = "".join(choice.logprobs.found["tokens"])  # as the model read it, which the offsets count
            self._left -= 1
            return []
        assert isinstance(event, NewToken)
        choice = self._choices[first + event.draw]
        choice.tokens.append(event)
        if event.finish is not None:
            choice.finish = _REASONS[event.finish]
            self._left -= 1
        if not event.shown and choice.finish is None and choice.logprobs is None:
            return []
        logprobs = None
        if choice.logprobs is not None:
            logprobs = choice.logprobs.add(event.token, event.log_prob, event.top, is_last=choice.finish is not None)
        index = first + event.draw
        return [{"index": index, "text": event.shown, "logprobs": logprobs, "finish_reason": choice.finish}]

    def _finished(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        text = choice.echo + "".join(token.shown for token in choice.tokens)
        logprobs = None if choice.logprobs is None else choice.logprobs.found
        # a prompt that was only scored has no end
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish or "length"}

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(asked.tokens) - 1 for asked in self._wanted.prompts)
        new = sum(len(choice.tokens) for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _cancel(self) -> None:
        for job in self._jobs:
            job.is_cancelled = True


async def _json_body(request: HttpRequest) -> Any:
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MOST_BYTES:
            raise RequestError(None, f"the request has more than {MOST_BYTES:,} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise RequestError(None, "the body is not JSON") from None


def _sent(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _error_of(message: str, name: str | None, code: str | None, kind: str) -> dict[str, Any]:
    param = name and name[:_SHOWN].encode(errors="backslashreplace").decode()  # a client's key may be no text
    return {"message": message, "type": kind, "param": param, "code": code}


def _error(
    status: int,
    message: str,
    name: str | None = None,
    code: str | None = None,
    kind: str = "invalid_request_error",
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """Return an error as OpenAI writes it."""
    return JSONResponse({"error": _error_of(message, name, code, kind)}, status, headers)


async def _no_such_page(request: HttpRequest, error: Exception) -> Response:
    return _error(404, f"there is no {request.url.path[:200]}; there are /, /health, /v1/models and /v1/completions")


async def _no_such_method(request: HttpRequest, error: Exception) -> Response:
    return _error(405, f"{request.url.path[:200]} does not take {request.method}")


async def _bug(request: HttpRequest, error: Exception) -> Response:
    return _error(500, f"internal error: {type(error).__name__}", kind="server_error")
