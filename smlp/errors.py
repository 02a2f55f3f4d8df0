"""Exceptions that reach a user as one line."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

#: environment variable with which an error that nobody foresaw ends in a traceback, for logs and tests
TRACEBACK = "SMLP_TRACEBACK"
#: begins each line of a message with several problems
_LIST_ITEM = "\n  "
_MOST = 200  # characters of a library's message


class UserError(ValueError):
    """Bad input: the message is one sentence that names the field or file and the numbers.

    Commands print it as a single line and exit with status 1; Python callers catch it as a ``ValueError``.
    """


def one_line(error: Exception | str) -> str:
    """Return a message with control characters and line ends escaped, except those between the items of a list."""
    lines = str(error).strip().split(_LIST_ITEM)
    return _LIST_ITEM.join("".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line) for line in lines)


def last_line(output: str) -> str:
    """Return the last line of a program's output that is not blank: mostly the reason why it failed."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output")


def out_of_memory(error: BaseException) -> str | None:
    """Return the message for an error that means that memory ran out; None for any other error."""
    # torch has no exception class of its own for this on CPUs
    words = ("can't allocate memory", "out of memory", "size calculation overflowed")
    if not isinstance(error, MemoryError) and not (
        isinstance(error, RuntimeError) and any(part in str(error) for part in words)
    ):
        return None
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    return "there is not enough memory for this" + (f": it asked for {asked[1]} at once" if asked else "")


def torch_refuses(error: BaseException) -> str | None:
    """Return the message for an error while torch is imported, mostly of a variable it reads; None for any other."""
    frames = traceback.extract_tb(error.__traceback__)
    if not any(frame.name == "<module>" and frame.filename.endswith("/torch/__init__.py") for frame in frames):
        return None
    given = " and ".join(refused_variables(error))
    reason = " ".join(str(error).split())[:_MOST]
    return f"torch cannot be imported{f' with {given} in the environment' if given else ''}: {reason}"


def refused_variables(error: BaseException) -> list[str]:
    """Return the names of torch's environment variables that are set and that an error names."""
    return [name for name in sorted(os.environ) if name.startswith(("TORCH", "PYTORCH")) and name in str(error)]


def unexpected(error: BaseException) -> str:
    """Return the message for an error that nobody foresaw, with the last line of this package that it passed."""
    package = Path(__file__).resolve().parent
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [at for at in frames if package in at[0].parents or package.parent / "data_prep" in at[0].parents]
    place = f" in {ours[-1][0].relative_to(package.parent)}, line {ours[-1][1]}" if ours else ""
    return f"unexpected {type(error).__name__}{place}: {error}"


class NaNError(UserError, FloatingPointError):
    """Not-a-number where none may be: training has diverged, or the weights are damaged."""

    @classmethod
    def in_layer(cls, name: str, error: Exception) -> NaNError:
        """Return the error of a layer, with advice on what to do about it."""
        return cls(f"{name}: {error}; if this is training, it has diverged: lower --lr or set --clip-norm")


class ParallelError(RuntimeError):
    """Raised if ranks do not fit together or one is lost; the message names rank, place and shapes."""

    @classmethod
    def lost(cls, where: str, error: Exception) -> ParallelError:
        """Return the error of a failed collective, without the library's source location and advice."""
        lacking = re.search(r"Unable to find (?:interface|address) for: (\S+)", str(error))
        if lacking:
            which = f"GLOO_SOCKET_IFNAME names {lacking[1]}, and this machine has no such interface that is up"
            return cls(f"{where} failed: {which}")
        reason = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).strip()).partition("\n")[0].split(". ")[0]
        return cls(f"{where} failed ({reason}): look for the rank that stopped first")
