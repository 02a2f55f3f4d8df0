"""Read datasets of the Hugging Face Hub through ``datasets``: shard by shard, streamed, of a fixed revision."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.fetch.source import Hub
from data_prep.flow.documents import Loss, ReadSettings, Record, document_of_row, in_json, too_long_for
from data_prep.flow.parts import FilePart
from data_prep.flow.streams import from_extra
from data_prep.flow.workers import PartFailed
from smlp.errors import UserError


def pinned(hub: Hub) -> tuple[Hub, int]:
    """Return the dataset with the commit that its revision stands for now, and the number of its shards.

    Raises:
        UserError: there is no such dataset, configuration or split, or the Hub cannot be reached.
    """
    _datasets()
    try:
        if not Path(hub.name).exists():
            from huggingface_hub import HfApi

            hub = replace(hub, revision=HfApi().dataset_info(hub.name, revision=hub.revision or None, timeout=60).sha)
        return hub, _opened(hub).num_shards
    except Exception as error:  # three libraries, each with its own exceptions; only the message matters
        raise UserError(f"hf:{hub.name}: {_sentence(error)}") from error


def files_of(hub: Hub) -> str:
    """Return a checksum of names, sizes and times of the files, if it is a folder on disk, which has no revision."""
    folder = Path(hub.name)
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.exists() else []
    rows = [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else ""


def rows(hub: Hub, shard: int, num_shards: int, part: FilePart, reading: ReadSettings) -> Iterator[Record | Loss]:
    """Yield the documents of one shard, in order.

    ``hub`` and ``num_shards`` are what :func:`pinned` gave; ``part`` names documents (``NAME:ROW``) and their source.

    Raises:
        UserError: there is no such column.
        PartFailed: the Hub did not answer, or no longer has what it had.
    """
    label = f"hf:{hub.name}: shard {shard} of {num_shards}"
    number, group = 0, []
    try:
        dataset = _opened(hub)
        if dataset.num_shards != num_shards:
            raise PartFailed(f"{label}: there are {dataset.num_shards} shards now; start over with --restart")
        for row in dataset.shard(num_shards, shard):
            if reading.text_field not in row:
                raise UserError(f"hf:{hub.name}: no column {reading.text_field!r}; there are {', '.join(row)}")
            piece = document_of_row(in_json(row, reading), number, part, reading)
            number += 1
            if hub.rows_per_document == 1 or isinstance(piece, Loss):
                yield piece
                continue
            group.append(piece)
            if len(group) == hub.rows_per_document:
                yield _joined(group, reading)
                group = []
    except (UserError, PartFailed):
        raise
    except Exception as error:  # network errors of several libraries, after their own retries
        raise PartFailed(f"{label}: broke off after {number:,} rows: {_sentence(error)}") from error
    if group:
        yield _joined(group, reading)


def _joined(group: list[Record], reading: ReadSettings) -> Record | Loss:
    text = "\n".join(record.text for record in group)
    if len(text.encode("utf-8", "surrogatepass")) > reading.max_bytes:
        return Loss(too_long_for(reading))
    return replace(group[0], text=text)


def _opened(hub: Hub) -> Any:
    options = {"split": hub.split, "revision": hub.revision or None, "streaming": True}
    return _datasets().load_dataset(hub.name, hub.config or None, **options)


def _datasets() -> Any:
    datasets = from_extra("datasets", "for datasets of the Hub")
    datasets.disable_progress_bars()
    return datasets


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
