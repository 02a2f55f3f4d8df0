"""The parts that a step works on: files, and ranges of large plain ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.flow.streams import COMPRESSIONS, name_of, suffix_of
from smlp.errors import UserError

PART_BYTES = 256 << 20  # of a plain file: larger ones are cut, so that all workers have something to do


@dataclass(frozen=True)
class Part:
    """A file, or the documents that begin in bytes ``start`` to ``stop`` of it.

    Attributes:
        path: the file.
        name: of what the step writes for it, without suffix; unique among its parts, the same on every run.
        source: the corpus, as its documents will say.
        start: first byte.
        stop: byte after the last, or None for the end.
    """

    path: Path
    name: str
    source: str
    start: int = 0
    stop: int | None = None

    @classmethod
    def whole(cls, path: Path, source: str = "") -> Part:
        """A file as one part."""
        return cls(path, name_of(path), source or name_of(path))

    @property
    def num_bytes(self) -> int:
        """On disk, for progress."""
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.start


def find_files(inputs: Sequence[Path], suffixes: Iterable[str]) -> list[tuple[Path, Path]]:
    """Files named, and those below folders named that end in ``suffixes`` (or these and a compression's), sorted.

    Left out are folders and files whose name begins with a point: what a step wrote for itself, or has not finished.

    Returns:
        Pairs of the input that led to a file, and the file.

    Raises:
        UserError: an input is not there, holds no such file, or is named twice.
    """
    suffixes = tuple(suffixes)
    found: list[tuple[Path, Path]] = []
    for place in inputs:
        if place.is_file():
            files = [place]
        elif place.is_dir():
            files = sorted(
                path
                for path in place.rglob("*")
                if suffix_of(path) in suffixes
                and path.is_file()
                and not any(name.startswith(".") for name in path.relative_to(place).parts)
            )
            if not files:
                kinds = ", ".join(suffixes)
                raise UserError(f"{place} holds no file that ends in {kinds} (plain or {', '.join(COMPRESSIONS)})")
        else:
            raise UserError(f"there is no file or folder {place}")
        found += [(place, path) for path in files]
    seen: dict[Path, Path] = {}
    for place, path in found:
        if path.resolve() in seen:
            raise UserError(f"{path} is read twice, by {seen[path.resolve()]} and by {place}: name it once")
        seen[path.resolve()] = place
    return found


def plan_parts(
    found: Sequence[tuple[Path, Path]], part_bytes: int = PART_BYTES, cut_text: bool = True, all_lines: bool = False
) -> list[Part]:
    """A part for each file, more for plain ``.jsonl`` and ``.txt`` above ``part_bytes``.

    Args:
        found: as :func:`find_files` gives it.
        part_bytes: of a part, at most.
        cut_text: False where a ``.txt`` is one document and must stay whole.
        all_lines: True where every file is lines of text, whatever its suffix, so that all plain ones may be cut.
    """
    parts: list[Part] = []
    names: set[str] = set()
    for place, path in found:
        relative = path.relative_to(place) if place.is_dir() else Path(path.name)
        stem = "--".join([*relative.parent.parts, name_of(path)])
        source = place.name if place.is_dir() else name_of(path)
        size = path.stat().st_size
        cuttable = path.suffix == ".jsonl" or (path.suffix == ".txt" and cut_text)
        cuttable = cuttable or (all_lines and path.suffix not in COMPRESSIONS)
        number = -(-size // part_bytes) if cuttable and size > part_bytes else 1
        bounds = [size * index // number for index in range(number)]
        for index, start in enumerate(bounds):
            name = unique_name(stem if number == 1 else f"{stem}-{index:05d}", names)
            parts.append(Part(path, name, source, start, bounds[index + 1] if index + 1 < number else None))
    return parts


def unique_name(name: str, names: set[str]) -> str:
    """``name``, or ``name+2`` and so on if it is among ``names``, which takes the result."""
    candidate, copy = name, 1
    while candidate in names:
        copy += 1
        candidate = f"{name}+{copy}"
    names.add(candidate)
    return candidate
