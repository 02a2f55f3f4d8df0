"""JSON and JSON lines that a command writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smlp.errors import UserError
from smlp.files import append_whole, write_whole

#: pipes kept open until the process ends, so that their readers wait for the result
_PIPES: dict[str, int] = {}
#: bytes of a file that are looked at
_LONGEST_BEGINNING = 1 << 24
#: standard output, which is a stream even where it goes to a file
STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
#: the first two keys of reports, and of lines
_REPORTS = {
    *(("checkpoint", "text"), ("checkpoint", "arch"), ("checkpoint", "model"), ("run", "state")),
    *(("settings", "tasks"), ("settings", "results")),
    *(("arch", "params"), ("arch", "device"), ("flops_per_token", "like"), ("ok", "checks"), ("path", "kind")),
    *(("model", "passed"), ("model", "settings"), ("model", "layers"), ("presets",), ("omega", "expansion")),
    *(("first", "second"), ("kind", "name"), ("sources", "free_bytes"), ("files", "splits"), ("presets", "paper")),
    ("schemaVersion", "deviceProperties"),  # of torch.profiler
}
_LINES = {("prompt", "index"), ("index", "begins"), ("task", "id"), ("task", "doc_id")}
_BEGINNING = re.compile(
    r'\s*\[?\s*\{\s*"(\w+)"\s*:(?:\s*(?:"(?:[^"\\]|\\.)*"|[^\s,{}\[\]"]+)\s*,\s*"(\w+)"\s*:)?', re.DOTALL
)


def write_json(path: str | None, value: Any) -> None:
    """Write ``value`` to the file that ``--json`` names; None: the option is not given.

    Raises:
        UserError: it cannot be written, or holds something else; the message names the file.
    """
    if path is None:
        return
    check_output("--json", path)
    text = json.dumps(value, indent=1, default=_plain) + "\n"
    _check_known(text, _REPORTS)
    _write("--json", path, text)


def write_json_lines(option: str, path: str, rows: Iterable[Any]) -> None:
    """Write one object a line to the file that an option names.

    Raises:
        UserError: as :func:`write_json`.
    """
    check_output(option, path)
    text = "".join(_line(row) for row in rows)
    _check_known(text, _LINES)
    _write(option, path, text)


@contextmanager
def json_lines(option: str, path: str) -> Iterator[Callable[[Any], None]]:
    """Open the file that an option names (``-`` is standard output), and yield a function that writes one object.

    Lines are not buffered, so that an interrupted command leaves what it did.

    Raises:
        UserError: as :func:`write_json`.
    """
    if path in STDOUT:
        yield lambda row: print(_line(row), end="", flush=True)
        return
    check_output(option, path)
    with _naming(option, path):
        file = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(row: Any) -> None:
        line = _line(row)
        _check_known(line, _LINES)
        with _naming(option, path):
            append_whole(file, line.encode())

    with file:
        yield write


def check_output(option: str, path: str) -> None:
    """Check, before long work, that its result can be written.

    A file that is there may only be an older result of a command, as its beginning shows.

    Raises:
        UserError: it cannot, or the file holds something else; the message names the file.
    """
    if path in STDOUT:
        return
    with _naming(option, path):
        if Path(path).is_dir():
            raise UserError(f"{option} {path} is a folder: name a file to write")
        with open(path if Path(path).is_file() else os.devnull, "rb") as file:
            text = file.read(_LONGEST_BEGINNING).decode(errors="replace")
        if not _is_known(text, _REPORTS if option in ("--json", "--trace") else _LINES):
            raise UserError(f"{option} {path}: a file of another kind exists already: name another one")
        folder = Path(os.path.realpath(path)).parent if Path(path).is_symlink() else Path(path).parent
        if not folder.is_dir():
            raise UserError(f"cannot write {option} {path}: there is no folder {folder}")
        place = path if Path(path).exists() else folder
        if not os.access(place, os.W_OK):
            raise UserError(f"cannot write {option} {path}: {place} may not be written to")
        if Path(path).is_fifo() and path not in _PIPES:
            try:
                _PIPES[path] = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                raise UserError(f"cannot write {option} {path}: nothing reads from this pipe") from None


def _is_known(text: str, known: set[tuple[str, ...]]) -> bool:
    begins = _BEGINNING.match(text)
    keys = tuple(filter(None, begins.groups())) if begins else ()
    if len(keys) == 1:  # a table or a list comes first
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
            keys = tuple(value[0] if isinstance(value, list) else value)[:2]
    return text.strip() in ("", "[]", "{}") or keys in known


def _check_known(text: str, known: set[tuple[str, ...]]) -> None:
    assert _is_known(text, known), f"add the beginning of {text[:80]} to the known ones"


def check_outputs(**paths: str | None) -> None:
    """Run :func:`check_output` for several options, which must not name the same file.

    Args:
        **paths: by option, with underscores for dashes; None for one that is not given.
    """
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        option = f"--{name.replace('_', '-')}"
        if path is None:
            continue
        check_output(option, path)
        other = seen.setdefault(Path(path).resolve(), option)
        if other != option:
            raise UserError(f"{other} and {option} both name {path}: one would overwrite the other")


def check_not_read(
    inputs: Iterable[str | Path | None], what: str = "a file that this command reads", **paths: str | None
) -> None:
    """Refuse outputs that are files which the command reads, under any of their names.

    Args:
        inputs: these files, whether they exist or not; None for one that is not given.
        what: they are.
        **paths: as of :func:`check_outputs`.

    Raises:
        UserError: an output is one of them; the message names it.
    """
    held = [Path(path) for path in inputs if path is not None]
    for name, path in paths.items():
        if path is not None and any(_is_same_file(Path(path), read) for read in held):
            raise UserError(f"--{name.replace('_', '-')} {path} is {what}: name another one")


def _is_same_file(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def remove_outputs(*paths: str | None) -> None:
    """Remove older results when the work begins, so that they cannot be taken for those of this command."""
    for path in map(Path, filter(None, paths)):
        if path.is_file() and str(path) not in STDOUT:
            try:
                os.truncate(path, 0) if path.is_symlink() else path.unlink()
            except OSError as error:
                raise UserError(f"cannot remove the older {path}: {error.strerror}") from None


def _line(row: Any) -> str:
    text = json.dumps(row, ensure_ascii=False, default=_plain) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, from bytes or escapes that are not text
        text = json.dumps(row, default=_plain) + "\n"
    return text


def _plain(value: Any) -> Any:
    """Convert numbers of numpy and torch to Python's, anything else to text."""
    return value.item() if hasattr(value, "item") else str(value)


def _write(option: str, path: str, text: str) -> None:
    with _naming(option, path):
        if path in STDOUT:
            print(text, end="", flush=True)
        elif os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):  # streams cannot be replaced
            Path(path).write_text(text, encoding="utf-8")
        else:
            write_whole(path, text.encode())


@contextmanager
def _naming(option: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {option} {path}: {error.strerror}") from None
