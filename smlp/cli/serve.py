"""``smlp serve``: OpenAI's completions endpoint for a checkpoint."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smlp.cli.numbers import MOST, whole
from smlp.cli.options import add_dtype_option, add_model_files, load_model
from smlp.errors import UserError

DESCRIPTION = "offer OpenAI's completions endpoint for a checkpoint, and a page to try the model"
EPILOG = """examples:
  smlp serve checkpoints/checkpoint_best.pt
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "The module", "max_tokens": 20, "seed": 1}'

http://127.0.0.1:8000/ is a page to try the model. OpenAI's clients take http://127.0.0.1:8000/v1 as their base_url.
Texts of several requests are written side by side. What requests may say: docs/serving.md. Needs the extra serve
(pip install -e '.[serve]'). Ctrl-C or SIGTERM ends the server.
"""
_KEY = "SMLP_API_KEY"
_SECONDS_TO_END = 5
_SECONDS_QUIET = 60
_BACKLOG = 512  # connections that wait; asyncio tries to accept so many at a time, also without descriptors


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("path", metavar="CHECKPOINT", help="checkpoint, in one file or in parts, or an export")
    add_model_files(parser)
    add_dtype_option(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s, this machine)")
    group.add_argument(
        "--port", **whole(0, 65535), default=8000, help="port; 0 for one that is free (default: %(default)s)"
    )
    group.add_argument("--name", help="name of the model for clients (default: the checkpoint's file or folder)")
    group.add_argument(
        "--api-key", metavar="KEY", help=f"key that clients must send (default: the variable {_KEY}, or none)"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-texts", **whole(), metavar="N", default=16, help="texts written at a time (default: %(default)s)"
    )
    limits.add_argument(
        "--max-queue",
        **whole(),
        metavar="N",
        default=64,
        help="prompts that may wait; a request beyond that is refused with status 429, unless none waits "
        "(default: %(default)s)",
    )
    limits.add_argument(
        "--max-tokens",
        **whole(1, MOST),
        metavar="N",
        help="limit on the new tokens of a text that a request may ask for (default: the model's context)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    if args.name is not None and not args.name.isprintable():
        raise UserError(f"--name must be one line of printable characters, got {args.name!r}")
    api_key = _checked_key(args.api_key)
    uvicorn = _uvicorn()
    listener = _listener(args.host, args.port)
    from smlp.inference.generation.continuations import banned_tokens
    from smlp.inference.scoring.candidates import drop_nothing
    from smlp.serving.app import make_app
    from smlp.serving.completion_request import RequestReader
    from smlp.serving.engine import Engine

    model = load_model(args, mapped=False)  # whoever copies a newer checkpoint over the file must not change the model
    config = model.decoder.config
    if config.is_leaky:
        raise UserError("a model with feature_routing=leaky reads the tokens that it predicts: it cannot generate text")
    drop_nothing(model.decoder)
    banned = banned_tokens(model.vocabulary)
    engine = Engine(model.decoder.eval(), model.tokenizer, banned, args.max_texts, args.max_queue)
    most_tokens = min(args.max_tokens or config.max_tokens, config.max_tokens)
    name = args.name or _name_of(Path(args.path))
    most_prompts = max(args.max_texts, args.max_queue)
    reader = RequestReader(name, config, model.tokenizer, model.start_token, most_tokens, args.max_texts, most_prompts)
    app = make_app(engine, reader, api_key)
    host, port = listener.getsockname()[:2]
    if not _is_loopback(host) and api_key is None:
        print(
            f"smlp: warning: everybody who reaches {host} can use the model: give --api-key to require a key",
            file=sys.stderr,
        )
    shown = f"[{host}]" if ":" in host else host
    settings: dict[str, Any] = {"log_level": "warning", "lifespan": "off", "backlog": _BACKLOG}
    server = uvicorn.Server(uvicorn.Config(app, **settings, timeout_graceful_shutdown=_SECONDS_TO_END))
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancelled_request)
    logging.getLogger("asyncio").addFilter(_Full())
    try:
        with _signals_that_only_end(server):
            print(f"{name} at http://{shown}:{port}/ (API: http://{shown}:{port}/v1)", flush=True)
            server.run(sockets=[listener])
    finally:
        engine.close()
    return 0


def _checked_key(given: str | None) -> str | None:
    """Return the API key of the option or the variable, None for no key; refuse one that a request cannot hold."""
    key = given or os.environ.get(_KEY) or None
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        source = "--api-key" if given else _KEY
        raise UserError(f"{source} must be printable ASCII without spaces or line ends around it, got {key!r:.40}")
    return key


def _is_no_cancelled_request(record: logging.LogRecord) -> bool:
    """Tell whether a line of uvicorn's log is to be shown: not of requests that the end of the server cuts off."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class _Full(logging.Filter):
    """Says once in a while that no connection can be opened; asyncio prints many tracebacks a second.

    Those of its attempts that are due when the server has ended are not shown either.
    """

    _next = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if not message.startswith("socket.accept() out of system resource"):
            is_closed = isinstance((record.exc_info or (None, None))[1], ValueError)
            return not (is_closed and message.startswith("Exception in callback") and "._start_serving(" in message)
        record.msg, record.args, record.exc_info = "no more connections can be opened: see ulimit -n", (), None
        is_due = time.monotonic() >= self._next
        self._next = time.monotonic() + _SECONDS_QUIET if is_due else self._next
        return is_due


def _uvicorn() -> Any:
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs {error.name}: pip install -e '.[serve]'") from None
    return uvicorn


def _listener(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded.

    Raises:
        UserError: another program has it, or there is no such address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # other programs can bind to a port that nobody listens at
        return listener
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--host {host} --port {port}: cannot listen there: {reason}") from None


def _name_of(path: Path) -> str:
    """Return the name of a checkpoint: that of its file, or of its folder if fairseq named the file."""
    path = path.resolve()
    name = path.parent.name if path.stem.startswith("checkpoint") and path.parent.name else path.stem
    return name.encode(errors="backslashreplace").decode()  # bytes that are no UTF-8 cannot be sent


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


@contextmanager
def _signals_that_only_end(server: Any) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the server, also before it handles them itself.

    The server raises them again when it has ended; here they then have no effect.
    """

    def end(*_: Any) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
