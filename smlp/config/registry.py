"""Tables of what a model can be made of, by name: routers, dense and sparse blocks, architectures.

The tables hold what comes with this package and what the files named in ``SMLP_PLUGINS`` register in the same way. Both
are imported, and torch with them, when a table is first looked at: importing this module is cheap.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from smlp.config import plugins
from smlp.errors import UserError

_T = TypeVar("_T")
#: origin of parts that come with the package
PACKAGE = "smlp"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Registry(Mapping[str, _T], Generic[_T]):
    """A table of one kind of part.

    Args:
        what: the kind, in messages.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._parts: dict[str, tuple[_T, str]] = {}

    def add(self, name: str, part: _T, origin: str = PACKAGE) -> None:
        """Enter a part. A part that the same origin entered before is replaced, as when a notebook's cell is run again.

        Args:
            name: lower-case letters, digits and underscores.
            part: what is looked up.
            origin: where it is defined, in messages.

        Raises:
            UserError: the name is of another form, or another origin has entered it.
        """
        if not _NAME.fullmatch(name):
            raise UserError(f"{self.what} {name!r}: a name has lower-case letters, digits and underscores only")
        if name in self._parts and self._parts[name][1] != origin:
            raise UserError(
                f"{self.what} {name!r} of {origin} is already registered by {self._parts[name][1]}: choose another name"
            )
        self._parts[name] = part, origin

    def added(self) -> list[str]:
        """Return the names that plugins have entered."""
        return [name for name in self if self._parts[name][1] != PACKAGE]

    @property
    def hint(self) -> str:
        """Return the end of an error message for an unknown name: what to do about it."""
        return f" (one of your own? name its file in {plugins.VARIABLE})"

    def __getitem__(self, name: str) -> _T:
        load()
        return self._parts[name][0]

    def __iter__(self) -> Iterator[str]:
        load()
        return iter(dict(self._parts))

    def __len__(self) -> int:
        load()
        return len(self._parts)


#: smlp.extend.RouterKind by the value of ``router``
ROUTERS: Registry[Any] = Registry("router")
#: smlp.extend.BlockKind by the value of ``dense_block``
DENSE_BLOCKS: Registry[Any] = Registry("dense block")
#: the same for ``sparse_block``
SPARSE_BLOCKS: Registry[Any] = Registry("sparse block")
#: settings of named architectures; see :mod:`smlp.config.presets`
ARCHITECTURES: Registry[dict[str, Any]] = Registry("architecture")

#: modules that register the package's own parts when imported
_BUILT_IN = ("smlp.config.presets", "smlp.moe.routers", "smlp.nn.blocks")
_TABLES = (ROUTERS, DENSE_BLOCKS, SPARSE_BLOCKS, ARCHITECTURES)
#: ``SMLP_PLUGINS`` when its files were loaded; its relative paths were resolved in the working directory of that time
_loaded: str | None = None
#: threads that are inside load()
_loading: set[int] = set()
_lock = threading.Lock()
_PATIENCE_SECONDS = 10.0


def load() -> None:
    """Register what comes with the package, and what the files in ``SMLP_PLUGINS`` bring.

    Raises:
        UserError: a file is missing or fails; nothing of it stays registered.
    """
    global _loaded
    wanted = os.environ.get(plugins.VARIABLE, "")
    if wanted == _loaded:  # first: torch.compile traces this, and knows no threads
        return
    thread = threading.get_ident()
    if thread in _loading:  # a plug-in looks something up while it is loaded
        return
    _loading.add(thread)
    try:
        for module in _BUILT_IN:
            importlib.import_module(module)  # if another thread imports it, this waits
        # not for ever: a plug-in may wait for a thread of its own that looks something up
        is_first = _lock.acquire(timeout=_PATIENCE_SECONDS)
        try:
            if is_first and wanted != _loaded:
                for path in plugins.named_files(wanted):
                    _load_file(path)
                _loaded = wanted
        finally:
            if is_first:
                _lock.release()
    finally:
        _loading.discard(thread)


def _load_file(path: Path) -> None:
    before, modules = [dict(table._parts) for table in _TABLES], set(sys.modules)
    try:
        plugins.import_file(path)
    except BaseException:
        beside = {name for name in set(sys.modules) - modules if _lies_beside(path, name.partition(".")[0])}
        for name in beside:  # that it imported: what they registered goes
            del sys.modules[name]
        for table, parts in zip(_TABLES, before, strict=True):
            table._parts = parts
        raise


def _lies_beside(path: Path, name: str) -> bool:
    """Return whether a module or package, not this one, is in the folder of a plug-in."""
    module = sys.modules.get(name)
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None) or ""]
    is_there = any(Path(place).resolve().parent == path.parent for place in places)
    return name != __name__.partition(".")[0] and is_there
