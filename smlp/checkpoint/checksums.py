"""Checksums of checkpoints, compared wherever weights are read.

A file of ``torch.save`` has a CRC-32 of each record, an export in safetensors a SHA-256 of the whole. Without this
comparison, a bit that flipped on a disk or in a transfer would be trained on. It reads a file once more than loading
does; ``SMLP_VERIFY_CHECKPOINTS=0`` leaves it out.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from smlp.checkpoint.export import digest_problem
from smlp.checkpoint.lazy import StoredTensor
from smlp.checkpoint.torch_file import named_tensors, read_structure, unreadable
from smlp.errors import UserError

VARIABLE = "SMLP_VERIFY_CHECKPOINTS"
_SHOWN = 3  # tensors named in a sentence
_FOLDER = 0x10  # of a record's attributes: it is a folder, for MS-DOS and for torch


def check_sums(path: str | Path) -> None:
    """Refuse a file that has changed since it was written, unless the environment says not to look.

    A file of ``torch.save`` in the old format, which has no checksums, is let pass.

    Raises:
        UserError: the message names the file and the tensors.
    """
    if os.environ.get(VARIABLE) == "0":
        return
    path = Path(path)
    if path.suffix == ".safetensors":
        problem = digest_problem(path)
    else:
        problem = record_problem(path) if zipfile.is_zipfile(path) else None
    if problem is not None:
        raise UserError(problem)


def record_problem(path: Path) -> str | None:
    """The sentence for records that were changed after they were written, by the names of the tensors in them.

    Raises:
        UserError: the file is truncated, or no archive.
    """
    places = damaged_places(path)
    if not places:
        return None
    try:
        content = read_structure(path)
    except UserError:  # what says which tensor is where is damaged itself
        content = None
    names = []
    stored = [(name, tensor) for name, tensor in named_tensors(content) if isinstance(tensor, StoredTensor)]
    for record, start, stop in places:
        names += [name for name, tensor in stored if start <= tensor.offset < stop] or [record]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{path} is damaged: {', '.join(names[:_SHOWN])}{more} differs from its checksum"


def damaged_places(path: str | Path) -> list[tuple[str, int, int]]:
    """Records of a file whose bytes do not have the checksum that the archive says.

    Returns:
        Of each its name, without the folder, and the bytes of the file among which it lies: first, and last + 1.

    Raises:
        UserError: the file is truncated, or no archive.
    """
    path, damaged = Path(path), []
    try:
        with zipfile.ZipFile(path) as archive:
            records = sorted(archive.infolist(), key=lambda info: info.header_offset)
            ends = [info.header_offset for info in records[1:]] + [path.stat().st_size]
            for info, end in zip(records, ends, strict=True):
                if not _is_intact(archive, info):
                    damaged.append((info.filename.partition("/")[2], info.header_offset, end))
    except Exception as error:  # reading arbitrary bytes can raise anything
        raise UserError(unreadable(path, error)) from error
    return damaged


def _is_intact(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    if info.external_attr & _FOLDER or info.volume:  # zipfile does not look, but torch would read nothing
        return False
    try:
        with archive.open(info) as record:
            while record.read(1 << 20):
                pass
    except OSError:
        raise
    except Exception:
        return False
    return True
