"""Runs ``smlp`` command lines side by side, and the ranks that ``--nproc`` starts, without importing torch for each.

Reads a JSON object of cases by name from standard input, each with ``args``, the command line, and ``folder``, where
its output goes (files ``out`` and ``err``); writes a JSON object of exit statuses. A case is a process forked from this
one. So is each of its ranks, at the point where it would execute its program: all else of the launcher is as it is.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 90


def run_here(args: Sequence[str]) -> None:
    """``smlp ARGS`` in this process, which then ends."""
    from smlp.cli.main import main

    status = 1
    try:
        status = main(list(args))
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def fork_rank(popen: Callable[..., Any], command: list[str], env: dict[str, str], preexec_fn: Any, **kw: Any) -> Any:
    """Like ``subprocess.Popen``, for ``python -m smlp ARGS``."""

    def instead_of_executing() -> None:
        preexec_fn()
        os.closerange(3, 256)  # among them the one that tells the parent that the program has begun
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        os.environ.update(env)
        run_here(command[command.index("smlp") + 1 :])

    return popen(command, env=env, preexec_fn=instead_of_executing, **kw)


def start_case(args: list[str], folder: Path) -> int:
    """Forks; returns the process id."""
    pid = os.fork()
    if pid:
        return pid
    for stream, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT), number)
    signal.alarm(LIMIT_SECONDS)
    run_here(args)
    return 0


def main() -> None:
    cases = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch._dynamo  # noqa: F401  what takes long

    if any(case["args"][:1] == ["train"] for case in cases.values()):
        import fairseq.trainer  # noqa: F401

    from smlp.launch import local

    subprocess.Popen = functools.partial(fork_rank, local.subprocess.Popen)
    names = {start_case(case["args"], Path(case["folder"])): name for name, case in cases.items()}
    statuses = {}
    while names:
        pid, status = os.wait()
        if pid in names:
            statuses[names.pop(pid)] = os.waitstatus_to_exitcode(status)
    print(json.dumps(statuses), file=answers, flush=True)


if __name__ == "__main__":
    main()
