"""Decide how to fetch a source, and check that this is possible: packages, permission, disk space."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.fetch.download import Patience, RemoteFile, bytes_there
from data_prep.fetch.listing import kept_files, named
from data_prep.fetch.source import Source
from data_prep.flow.documents import FORMATS, ReadSettings
from data_prep.flow.parts import find_files
from data_prep.flow.running import StepRun
from data_prep.flow.streams import compression_of, suffix_of
from smlp.errors import UserError
from smlp.files import existing

RAW = ".raw"  # in OUT; steps that read OUT skip names that begin with a dot
# Documents as .jsonl.gz, per byte of their text: measured on English news and articles, rounded up.
COMPRESSED_SHARE = 0.45
_PACKAGES = {"wikipedia": ("mwparserfromhell",), "warc": ("warcio", "trafilatura"), "parquet": ("pyarrow",)}


@dataclass(frozen=True)
class Wanted:
    """A source and how it is to be fetched."""

    source: Source
    out: Path  # folder of all sources
    run: StepRun  # its ``out`` is the source's own folder
    options: dict[str, str]  # values of the source's options
    reading: ReadSettings
    compression: str = "gz"  # of what is written, a key of ``COMPRESSIONS``
    file_bytes: int = 256 << 20  # size of a written file before compression
    limit_files: int | None = None  # the first files (or shards) only
    limit_documents: int | None = None  # the first documents of each file only
    connections: int = 3  # files downloaded at a time
    patience: Patience = field(default_factory=Patience)
    delete_downloads: bool = False  # each file is downloaded, converted and deleted by one worker
    check_space: bool = True  # refuse to start if the disk is too small
    restart: bool = False  # discard results of other settings, and read the list of files again

    @property
    def raw(self) -> Path:
        """The folder of its downloads."""
        return self.out / RAW / self.source.name

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that its documents depend on."""
        return {
            "source": self.source.name,
            "source_sha256": hashlib.sha256(self.source.definition.encode()).hexdigest(),
            "options": self.options,
            "text_field": self.reading.text_field,
            "documents": self.reading.documents_of_text,
            "max_document_bytes": self.reading.max_bytes,
            "max_document_seconds": self.reading.max_seconds,
            "limit_files": self.limit_files,
            "limit_documents": self.limit_documents,
            "compress": self.compression,
            "file_bytes": self.file_bytes,
        }

    def missing_packages(self) -> list[str]:
        """Return the names of packages that this source needs and that are not installed."""
        source = self.source
        names = [*source.paths, *(Path(file.url) for file in source.files)]
        needed = list(_PACKAGES.get(source.format, ()))
        needed += ["requests"] if source.from_web else []
        needed += ["datasets", "huggingface_hub"] if source.hub else []
        needed += ["pyarrow"] if any(suffix_of(path) == ".parquet" for path in source.paths) else []
        is_zst = self.compression == "zst" or any(compression_of(path) == ".zst" for path in names)
        needed += ["zstandard"] if is_zst else []
        return sorted({name for name in needed if importlib.util.find_spec(name) is None})

    def known_files(self) -> list[RemoteFile] | None:
        """Return the files that an earlier command found or the source itself names; None if only the server knows."""
        listed = self._listed()
        return None if listed is None else listed[: self.limit_files]

    def _listed(self) -> list[RemoteFile] | None:
        """Return the files of :meth:`known_files` and those that the limit leaves out."""
        kept = kept_files(self.source, self.options, self.raw) if self.source.from_web else None
        if kept is None and self.source.files:
            kept = named(list(self.source.files), self.source.format)
        return kept

    def _num_local(self) -> int | None:
        """Return the number of a source's files on disk, with those beyond the limit; None for other sources."""
        with suppress(UserError):
            return len(find_files(self.source.paths, FORMATS)) or None
        return None

    def sizes(self, files: Sequence[RemoteFile] | None, num_shards: int | None = None) -> dict[str, int | None]:
        """Estimate the bytes of downloads, of text and of documents, and the disk space that is still needed.

        Shards of the Hub are converted while they are read, and need no space of their own.

        Args:
            files: those that are still missing; None for all, as far as they are known.
            num_shards: of the Hub's dataset, with those beyond the limit, if it is known.

        Returns:
            ``download_bytes``, ``text_bytes``, ``document_bytes``, ``needed_bytes``; None for what is unknown.
        """
        size = self.source.size
        total = size.files or num_shards or (self._num_local() if files is None else len(self._listed() or files))
        number = self.limit_files if files is None else len(files)
        share = 1.0 if total is None or number is None else min(1.0, number / max(total, 1))
        download = None if size.bytes is None else round(size.bytes * share)
        if files is not None and all(file.num_bytes is not None for file in files):
            download = sum(file.num_bytes for file in files)
        documents = None
        if size.text_bytes is not None and self.limit_documents is None:
            documents = round(size.text_bytes * COMPRESSED_SHARE * share)
        room = download if self.source.from_web else None
        if room is not None and self.delete_downloads:
            largest = max((file.num_bytes or 0 for file in files or ()), default=0)
            per_file = largest or room // max(len(files or ()) or size.files or 1, 1)
            room = min(room, self.run.workers * per_file)
        there = sum(bytes_there(self.raw / file.name) for file in files or ())
        known = [] if room is None else [max(0, room - there)]
        known += [] if documents is None else [documents]
        return {
            "download_bytes": download,
            "text_bytes": size.text_bytes,
            "document_bytes": documents,
            "needed_bytes": sum(known) if known else None,
        }

    def refuse_small_disk(self, need: int | None) -> None:
        """Raise UserError if the disk has less space than the bytes that are needed, if these are known."""
        free = free_bytes(self.out)
        if self.check_space and need is not None and need > free:
            less = "--delete-downloads or " if self.source.from_web and not self.delete_downloads else ""
            raise UserError(
                f"{self.source.name} still needs about {need / 1e9:,.1f} GB in {self.out}, {free / 1e9:,.1f} are free: "
                f"{less}--limit-files (with --restart) would need less, --no-space-check continues anyway"
            )


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that a folder is on, or will be."""
    return shutil.disk_usage(existing(folder)).free
