"""Divide the input into parts: files, and ranges of large plain ones."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.flow.manifest import MANIFEST, SETTINGS, STATE, read_settings
from data_prep.flow.streams import COMPRESSIONS, PARTIAL, compression_of, name_of, suffix_of
from smlp.errors import UserError, one_line
from smlp.files import regular_file

_SHOWN = 5  # most names of unread files in a message
_NAME_BYTES = 160  # of a part's name; file systems allow 255, with suffixes
PART_BYTES = 256 << 20  # larger plain files are cut into parts, so that all workers are busy
MOST_PARTS = 100_000  # of one file; their names have five digits, in the order of the text


@dataclass(frozen=True)
class FilePart:
    """A file, or the documents that begin in bytes ``start`` to ``stop`` of it."""

    path: Path  # the file
    name: str  # name of the step's output for it, without suffix; unique among its parts, the same in every run
    source: str  # the corpus, as its documents will say
    start: int = 0  # first byte
    stop: int | None = None  # byte after the last, or None for the end
    # for the ids of its documents: the file's path below the input that led to it; with +2 and so on if two are alike
    label: str = ""

    @property
    def prefix(self) -> str:
        """The beginning of the ids of its documents."""
        return self.label or self.path.name

    @classmethod
    def whole(cls, path: Path) -> FilePart:
        """Return a file as one part."""
        return cls(path, name_of(path), name_of(path))

    @property
    def num_bytes(self) -> int:
        """Its size on disk, for progress."""
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.start


def find_files(inputs: Sequence[Path], suffixes: Iterable[str]) -> list[tuple[Path, Path]]:
    """Return files named, and those in named folders that end in ``suffixes`` (or these and a compression's), sorted.

    Names that begin with a dot are skipped: they are a step's own files, or unfinished.

    Returns:
        Pairs of the input that led to a file, and the file.

    Raises:
        UserError: an input does not exist, holds no such file, or is named twice.
    """
    suffixes = tuple(suffixes)
    found: list[tuple[Path, Path]] = []
    for place in inputs:
        if place.is_file():
            files = [place]
        elif place.is_dir():
            files = files_in(place, suffixes)
            if not files:
                kinds = ", ".join(suffixes)
                raise UserError(f"{place} holds no file that ends in {kinds} (plain or {', '.join(COMPRESSIONS)})")
        else:
            files = [regular_file(place, "file or folder")]
        for problem in unfinished(files):
            raise UserError(problem)
        found += [(place, path) for path in files]
    seen: dict[Path, tuple[Path, Path]] = {}
    for place, path in found:
        real = path.resolve()
        if real in seen:
            before, same = seen[real]
            if same != path and before == place:
                raise UserError(f"{same} and {path} are one file, which would be read twice: remove the link")
            raise UserError(f"{path} is read twice, by {before} and by {place}: name it once")
        seen[real] = place, path
    return found


def unfinished(files: Iterable[Path]) -> list[str]:
    """Return a sentence for each folder of these files that a step has not finished; fetch's may be read all the same.

    Some of the files of a fetch may remain unavailable.
    """
    return [
        f"{folder} is not finished: run 'smlp data {step}' again"
        for folder, step in _unfinished(files)
        if step != "fetch"
    ]


def _unfinished(files: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return the folders of these files whose step has not written its manifest yet, and the names of the steps."""
    found = []
    for folder in sorted({parent for path in files for parent in (path.parent, path.parent.parent)}):
        record = folder / STATE / SETTINGS
        if record.is_file() and not (folder / MANIFEST).is_file():
            found.append((folder, read_settings(record)["step"]))
    return found


def report_left_out(inputs: Sequence[Path], suffixes: Iterable[str], read: Iterable[Path] | None = None) -> None:
    """Print a line for each folder with files that are not read, except for those that a step itself writes.

    ``read`` are those that are, by default all with these suffixes.
    """
    for place in inputs:
        if not place.is_dir():
            continue
        files, hidden = _walk(place)
        for folder, _ in _unfinished(files):
            print(f"{one_line(str(folder))} is not finished: some of its files are missing", file=sys.stderr)
        known = set(read) if read is not None else {path for path in files if _is_wanted(path, tuple(suffixes))}
        others = [path for path in files if path not in known and path.name != MANIFEST]
        others += [path for path in hidden if _is_wanted(path, tuple(suffixes))]
        if others:
            shown = ", ".join(one_line(str(path.relative_to(place))) for path in others[:_SHOWN])
            more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
            print(f"not read in {one_line(str(place))}: {shown}{more}", file=sys.stderr)


def files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files below a folder that :func:`find_files` finds there; it may have none.

    Raises:
        UserError: a folder may not be read.
    """
    return [path for path in _walk(folder)[0] if _is_wanted(path, suffixes)]


def _walk(place: Path) -> tuple[list[Path], list[Path]]:
    """Return all files below a folder, links followed, sorted: visible ones, and those whose names begin with a dot.

    Folders with such names are skipped.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: {error.strerror}")

    files = []
    seen: set[Path] = set()
    for folder, subfolders, names in os.walk(place, onerror=refuse, followlinks=True):
        real = Path(folder).resolve()
        if real in seen:  # a cyclic link
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        files += [Path(folder) / name for name in names if not name.endswith(PARTIAL)]
    files.sort()
    hidden = [path for path in files if path.name.startswith(".")]
    return [path for path in files if not path.name.startswith(".")], hidden


def linked_folders(place: Path) -> set[Path]:
    """Return the folders to which links in a folder lead, and links in those."""
    found: set[Path] = set()
    waiting = [place]
    while waiting:
        for folder, subfolders, _ in os.walk(waiting.pop()):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            links = {Path(folder, name).resolve() for name in subfolders if os.path.islink(os.path.join(folder, name))}
            waiting += links - found
            found |= links
    return found


def _is_wanted(path: Path, suffixes: tuple[str, ...]) -> bool:
    return suffix_of(path) in suffixes and path.is_file()


def plan_parts(
    found: Sequence[tuple[Path, Path]], part_bytes: int = PART_BYTES, cut_text: bool = True, all_lines: bool = False
) -> list[FilePart]:
    """Return a part for each file, and more for plain ``.jsonl`` and ``.txt`` above ``part_bytes``.

    Args:
        found: as :func:`find_files` gives it.
        part_bytes: of a part, at most.
        cut_text: False if a ``.txt`` is one document and must stay whole.
        all_lines: True if every file is lines of text, whatever its suffix, so that all plain ones may be cut.

    Raises:
        UserError: a file would have more than :data:`MOST_PARTS`.
    """
    parts: list[FilePart] = []
    names: set[str] = set()
    labels: set[str] = set()
    for place, path in found:
        relative = path.relative_to(place) if place.is_dir() else Path(path.name)
        label = _unused(str(relative), labels)
        stem = "--".join([*relative.parent.parts, name_of(path).lstrip(".") or "file"])  # no hidden outputs
        source = place.resolve().name if place.is_dir() else name_of(path)
        size = path.stat().st_size
        cuttable = path.suffix.lower() == ".jsonl" or (path.suffix.lower() == ".txt" and cut_text)
        cuttable = cuttable or (all_lines and not compression_of(path))
        number = -(-size // part_bytes) if cuttable and size > part_bytes else 1
        if number > MOST_PARTS:
            raise UserError(
                f"{path} has {size:,} bytes, which would be {number:,} parts of {part_bytes:,}; the most are "
                f"{MOST_PARTS:,}: take parts of at least {-(-size // MOST_PARTS):,} bytes"
            )
        bounds = [size * index // number for index in range(number)]
        for index, start in enumerate(bounds):
            name = unique_name(stem if number == 1 else f"{stem}-{index:05d}", names)
            parts.append(FilePart(path, name, source, start, bounds[index + 1] if index + 1 < number else None, label))
    return parts


def unique_name(name: str, names: set[str]) -> str:
    """Return ``name``, or ``name+2`` and so on if it is among ``names``, to which the result is added.

    A name that is too long for a file is cut and given a checksum; line ends in it become spaces.
    """
    name = name.replace("\n", " ").replace("\r", " ")
    if len(os.fsencode(name)) > _NAME_BYTES:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        name = f"{os.fsencode(name)[:_NAME_BYTES].decode('utf-8', 'ignore')}-{digest}"
    return _unused(name, names)


def _unused(name: str, names: set[str]) -> str:
    candidate, copy = name, 1
    while candidate in names:
        copy += 1
        candidate = f"{name}+{copy}"
    names.add(candidate)
    return candidate
