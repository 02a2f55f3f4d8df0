"""What must be true before a long download begins: packages, a folder to write to, room on its disk."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from data_prep.fetch.download import RemoteFile
from data_prep.fetch.source import Source
from data_prep.flow.streams import suffix_of

# Documents as .jsonl.gz, per byte of their text: measured on English news and articles, rounded up.
COMPRESSED_SHARE = 0.45
_PACKAGES = {"wikipedia": ("mwparserfromhell",), "warc": ("warcio", "trafilatura"), "parquet": ("pyarrow",)}


def missing_packages(source: Source, files: Sequence[Path], compression: str) -> list[str]:
    """Names of packages that this source needs and that are not installed."""
    needed = list(_PACKAGES.get(source.format, ()))
    needed += ["requests"] if source.from_web else []
    needed += ["datasets", "huggingface_hub"] if source.hub else []
    needed += ["pyarrow"] if any(suffix_of(path) == ".parquet" for path in files) else []
    names = [*files, *(Path(file.url) for file in source.files)]
    needed += ["zstandard"] if compression == "zst" or any(path.suffix == ".zst" for path in names) else []
    return sorted({name for name in needed if importlib.util.find_spec(name) is None})


def not_writable(folder: Path) -> str:
    """Why nothing can be written to a folder that may not be there yet; "" if it can."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{folder} cannot be made: {place} is no folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written to"


def free_bytes(folder: Path) -> int:
    """Of the disk that a folder is on, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def download_bytes(source: Source, files: Sequence[RemoteFile] | None, limit_files: int | None) -> int | None:
    """Bytes to download: from the list of files where it says so, else from the source's own size; None if unknown."""
    if files is not None and all(file.num_bytes is not None for file in files):
        return sum(file.num_bytes for file in files)
    if source.size.bytes is None:
        return None
    return round(source.size.bytes * share_of_files(source, files, limit_files))


def document_bytes(source: Source, files: Sequence[RemoteFile] | None, limit_files: int | None) -> int | None:
    """Bytes that the documents take on disk, roughly; None if unknown."""
    if source.size.text_bytes is None:
        return None
    return round(source.size.text_bytes * COMPRESSED_SHARE * share_of_files(source, files, limit_files))


def share_of_files(source: Source, files: Sequence[RemoteFile] | None, limit_files: int | None) -> float:
    """What part of the source's files is wanted, as far as their number is known."""
    total = source.size.files or (len(files) if files is not None else None)
    wanted = len(files) if files is not None else limit_files
    return 1.0 if total is None or wanted is None else min(1.0, wanted / max(total, 1))
