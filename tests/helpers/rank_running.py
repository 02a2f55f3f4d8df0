"""Running cases of rank_cases.py in several ranks, for the tests."""

from __future__ import annotations

import functools
import json
import select
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from running import start_python


@dataclass(frozen=True)
class RanksEnded:
    """What became of the ranks of a case, each list by rank."""

    codes: list[int]
    seconds: list[float]
    errors: list[str]
    results: list[Any]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """One server for all tests; it ends when this process does and its standard input closes."""
    return start_python(Path(__file__).with_name("rank_forks.py"), stderr=_server_errors())


@functools.cache
def _server_errors() -> IO[str]:
    return tempfile.TemporaryFile("w+")


def end_ranks(
    case: str, ranks: int, timeout: float = 60, collective_timeout: float = 30, **arguments: Any
) -> RanksEnded:
    """Runs function ``case`` of rank_cases.py in so many processes, however they end.

    Args:
        timeout: seconds after which all of them are killed.
        collective_timeout: seconds after which a collective fails.
        **arguments: of the function.
    """
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        request = {"case": case, "ranks": ranks, "timeout": timeout, "collective_timeout": collective_timeout}
        server.stdin.write(json.dumps({**request, "folder": folder, "arguments": arguments}) + "\n")
        server.stdin.flush()
        ready, _, _ = select.select([server.stdout], [], [], timeout + 30)
        assert ready, f"no answer within {timeout + 30} s"
        answer = server.stdout.readline()
        assert answer, _server_errors().seek(0) or _server_errors().read()
        return RanksEnded(**json.loads(answer))


def run_ranks(case: str, ranks: int, **arguments: Any) -> list[Any]:
    """The same where every rank must succeed; returns what the function returned on each."""
    ended = end_ranks(case, ranks, **arguments)
    assert ended.codes == [0] * ranks, "\n".join(f"--- rank {r}\n{text}" for r, text in enumerate(ended.errors))
    return ended.results
