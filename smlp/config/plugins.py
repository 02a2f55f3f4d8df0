"""Files of the user that register routers, blocks and architectures (docs/extending.md); needs no torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import traceback
import zlib
from pathlib import Path

from smlp.errors import UserError

#: environment variable that names the files, separated as in PATH; all processes of a run inherit it
VARIABLE = "SMLP_PLUGINS"
#: files that were run, or began to be
_run: set[Path] = set()


def named_files(value: str) -> list[Path]:
    """Return the files that a value of the variable names, in order, without repetitions.

    Raises:
        UserError: there is no such file, or its folder may not be entered.
    """
    files: dict[Path, None] = {}
    for word in value.split(os.pathsep):
        if not word:
            continue
        path = _path_of(word)
        if not os.path.isfile(path):
            raise UserError(f"{VARIABLE} names {word}, which is not a file that can be read")
        files[path.resolve()] = None
    return list(files)


def _path_of(word: str) -> Path:
    try:
        return Path(word).expanduser()
    except RuntimeError:  # there is no such user
        return Path(word)


def import_file(path: Path) -> None:
    """Run a file as a module, unless it is imported already.

    Raises:
        UserError: it fails; the message names the line.
    """
    _run.add(path)
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    if any(Path(file).resolve() == path for file in files if file.endswith(path.name)):
        return
    # a name that no other module has: the file may share its name with one of Python's modules
    name = f"smlp_plugin_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        where = None if isinstance(error, SyntaxError) else _place(error, {path})  # a SyntaxError names its line
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{VARIABLE}: {where or path} cannot be loaded: {reason}") from error


def fault(error: BaseException) -> str | None:
    """Return the message for an exception that the code of a plug-in raised; None for any other error."""
    if not isinstance(error, Exception):
        return None
    where = _place(error, _run)
    return where and f"{VARIABLE}: {where} failed: {type(error).__name__}: {error}"


def _place(error: BaseException, files: set[Path]) -> str | None:
    """Return the last file among ``files`` that an error passed through, and the line there; None without one."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename}, line {frame.lineno}," for frame in frames if Path(frame.filename) in files]
    return places[-1] if places else None
