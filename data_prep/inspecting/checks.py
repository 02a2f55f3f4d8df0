"""The folders of binary data, and what their manifest says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.flow.manifest import MANIFEST, read_manifest
from data_prep.flow.streams import sha256_of
from data_prep.inspecting.statistics import Statistics
from data_prep.inspecting.token_file import TokenFile
from smlp.errors import UserError
from smlp.text.tokenizer import Vocabulary
from smlp.text.tokenizer_files import DICTIONARY


@dataclass
class Inspection:
    """What was found: statistics by file ("shard00/train"), and what is wrong, a sentence each."""

    vocabulary: Vocabulary
    files: dict[str, Statistics] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def by_split(self) -> dict[str, Statistics]:
        """Statistics of all shards together."""
        splits: dict[str, Statistics] = {}
        for name, found in self.files.items():
            splits.setdefault(Path(name).name, Statistics(len(self.vocabulary))).add(found)
        return splits


def shards_of(folder: Path) -> list[Path]:
    """The folders of data: ``folder`` itself, or its ``shard*``.

    Raises:
        UserError: there are none.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if any(folder.glob("*.idx")):
        return [folder]
    shards = sorted(path for path in folder.glob("shard*") if path.is_dir())
    if not shards:
        raise UserError(f"{folder} holds no binary data: neither .idx files nor folders shard*")
    return shards


def bytes_to_read(folder: Path, verify: bool) -> int:
    """How much :func:`inspect` reads of data that are whole, nearly."""
    passes = {".bin": 3, ".idx": 2}  # of an index the lengths, a third of it, four times
    files = [path for path in (file for shard in shards_of(folder) for file in shard.iterdir()) if path.is_file()]
    return sum((passes.get(path.suffix, 0) + verify) * path.stat().st_size for path in files)


def inspect(folder: Path, verify: bool, seen: Callable[[int], None]) -> Inspection:
    """Reads everything; ``seen`` is told of every number of bytes that is read.

    Raises:
        UserError: there is nothing to read, or the first dictionary cannot be read.
    """
    shards = shards_of(folder)
    manifest = read_manifest(folder, "binarize") if (folder / MANIFEST).is_file() else None
    needs_document_end = manifest is not None and manifest["settings"]["format"] == "documents"
    first = shards[0] / DICTIONARY
    found = Inspection(Vocabulary.load(first))
    for shard in shards:
        if shard != shards[0]:
            found.problems += _dictionary_problems(first, shard / DICTIONARY)
        for path in sorted({path.with_suffix("") for kind in ("idx", "bin") for path in shard.glob(f"*.{kind}")}):
            name = str(path.relative_to(folder))
            try:
                file = TokenFile.open(path, seen)
            except UserError as error:
                found.problems.append(str(error))
                continue
            problems = list(file.problems(len(found.vocabulary), needs_document_end))
            found.problems += problems
            if not problems:
                found.files[name] = Statistics.of(file, len(found.vocabulary))
    if manifest is not None:
        found.problems += _manifest_problems(folder, manifest, found, verify, seen)
    return found


def _dictionary_problems(first: Path, other: Path) -> Iterator[str]:
    if not other.is_file():
        yield f"{other} is missing"
    elif other.read_bytes() != first.read_bytes():
        sizes = [len(path.read_bytes()) for path in (other, first)]
        yield f"{other} ({sizes[0]} bytes) is another dictionary than {first} ({sizes[1]} bytes)"


def _manifest_problems(
    folder: Path, manifest: dict[str, Any], found: Inspection, verify: bool, seen: Callable[[int], None]
) -> Iterator[str]:
    listed = {row["name"] for row in manifest["outputs"]}
    for name in found.files:
        if f"{name}.bin" not in listed:
            yield f"{folder / name}.bin is not in the manifest"
    for row in manifest["outputs"]:
        path = folder / row["name"]
        if not path.is_file():
            if f"{path} is missing" not in found.problems:
                yield f"{path} is missing, but the manifest lists it"
            continue
        if path.stat().st_size != row["bytes"]:
            yield f"{path} has {path.stat().st_size} bytes, the manifest says {row['bytes']}"
        elif verify:
            if (digest := sha256_of(path)) != row["sha256"]:
                yield f"{path} has the SHA-256 {digest}, the manifest says {row['sha256']}"
            seen(row["bytes"])
        statistics = found.files.get(str(Path(row["name"]).with_suffix("")))
        for count in ("tokens", "lines", "ends"):
            if count in row and statistics is not None and getattr(statistics, count) != row[count]:
                yield f"{path} has {getattr(statistics, count)} {count}, the manifest says {row[count]}"
    for split, statistics in found.by_split().items():
        said = manifest["splits"].get(split, {}).get("unknown", 0)
        if statistics.tokens == manifest["splits"].get(split, {}).get("tokens") and statistics.unknown != said:
            yield f"{split} in {folder} has {statistics.unknown} unknown tokens, the manifest says {said}"
    kept = manifest["counts"]["kept"]
    ends = sum(row["ends"] for row in manifest["splits"].values())
    if manifest["settings"]["format"] == "documents" and kept != ends:
        yield f"{folder / MANIFEST} counts {kept} documents kept, but {ends} ends of documents"
