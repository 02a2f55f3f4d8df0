"""Keep scores while a command runs, so that an interrupted one resumes where it stopped.

The scores are in a file next to the output: the first line says what they are of, and each batch adds a line of JSON,
which goes to the operating system as soon as the batch is scored. Batches depend on nothing but what the first line
pins, so that the numbers of a resumed run are those of one that was never stopped, bit for bit on one machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import smlp
from smlp import files
from smlp.checkpoint.lazy import as_bytes
from smlp.errors import UserError
from smlp.launch.team import Team
from smlp.nn.decoder import Decoder

#: by the number of a batch: for each of its groups and candidates the log-probabilities
Batches = dict[int, list[list[np.ndarray]]]
#: scores of a task's candidates with their contexts, and without them
PARTS = ("in context", "alone")


def partial_path(output: str) -> Path:
    """Return where the scores of an output are kept: next to it; if it is a link, next to the file that it names."""
    return Path(f"{os.path.realpath(output)}.partial" if os.path.islink(output) else f"{output}.partial")


def digest_of(values: Iterable[Any]) -> str:
    """Return a checksum of plain values, or of dataclasses that hold them."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def weights_digest(decoder: Decoder) -> str:
    """Return a checksum of a model: its configuration and all its weights, wherever the checkpoint lies."""
    digest = hashlib.blake2b(repr(decoder.config).encode())
    for name, tensor in decoder.state_dict().items():
        digest.update(name.encode())
        digest.update(as_bytes(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()


@dataclass
class KeptBatches:
    """Batches of one part of a task."""

    task: str
    part: str
    known: Batches = field(default_factory=dict)
    #: file for new scores; None except on the first rank
    path: Path | None = None

    def add(self, batches: Batches) -> None:
        """Write batches that have just been scored.

        Raises:
            UserError: they cannot be written.
        """
        if self.path is None:
            return
        lines = []
        for number, scores in batches.items():
            line = {
                "task": self.task,
                "part": self.part,
                "batch": number,
                "log_probs": [[candidate.tolist() for candidate in group] for group in scores],
            }
            lines.append({**line, "crc32": _checksum(line)})
        _append(self.path, lines)


class PartialScores:
    """The scores that a stopped run has left, to which this run adds its own.

    Every rank makes one; the first one reads and writes the file.

    Args:
        path: from :func:`partial_path`.
        pins: what the scores depend on, by name; plain values.
        team: the ranks of this run.

    Raises:
        UserError: the file holds scores of something else, or is damaged, or cannot be written.
    """

    def __init__(self, path: Path, pins: Mapping[str, Any], team: Team) -> None:
        self.path = path
        self._writes = team.is_first
        found: dict[tuple[str, str], Batches] | UserError | None = None
        try:
            if self._writes:
                found = _read(path, json.loads(json.dumps({"smlp": smlp.__version__, **pins})))
        except UserError as error:
            found = error
        found = team.gather(found)[0]
        if isinstance(found, UserError):
            raise found
        self._known = found or {}

    @property
    def num_batches(self) -> int:
        """Return the number of batches that need not be scored again."""
        return sum(map(len, self._known.values()))

    def num_records(self, task: str) -> int:
        """Return the number of records of a task that need not be scored again in context."""
        return sum(map(len, self._known.get((task, PARTS[0]), {}).values()))

    def of(self, task: str) -> tuple[KeptBatches, ...]:
        """Return the batches of a task, one object for each of ``PARTS``."""
        path = self.path if self._writes else None
        return tuple(KeptBatches(task, part, self._known.get((task, part), {}), path) for part in PARTS)

    def remove(self) -> None:
        """Remove the file; call this once the output is written."""
        if self._writes:
            self.path.unlink(missing_ok=True)


def _read(path: Path, pins: dict[str, Any]) -> dict[tuple[str, str], Batches]:
    """Return the batches in a file, which is made if it is not there."""
    if path.is_symlink():
        raise UserError(f"{path} is a link, through which no scores are kept: remove it")
    try:
        content = files.read_bytes(path) if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # the last line may be truncated
        if not whole and (json.dumps(pins) + "\n").encode().startswith(content):
            path.write_bytes(b"")
            _append(path, [pins])
            return {}
        first, *lines = whole.splitlines()
        _check_pins(path, json.loads(first), pins)
        known: dict[tuple[str, str], Batches] = {}
        for line in map(json.loads, lines):
            if line.pop("crc32") != _checksum(line):
                raise ValueError("a line was changed")
            scores = [[np.array(candidate) for candidate in group] for group in line["log_probs"]]
            known.setdefault((line["task"], line["part"]), {})[line["batch"]] = scores
        if len(whole) < len(content):
            with open(path, "r+b") as file:
                file.truncate(len(whole))
    except OSError as error:
        raise UserError(f"cannot keep scores in {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged, or not a file of scores: remove it to score all records again") from None
    return known


def _check_pins(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    changed = []
    for name in {**theirs, **ours}:
        if name not in theirs or name not in ours:
            changed.append(f"{name} only {'there' if name in theirs else 'here'}")
        elif theirs[name] != ours[name]:
            values = f"{name} {theirs[name]} there and {ours[name]} here"
            changed.append(f"other {name}" if _is_digest(ours[name]) else values)
    if changed:
        raise UserError(
            f"{path} holds scores of a run that was stopped, with {', '.join(changed)}: repeat its command to resume "
            "it, remove the file to start over, or name another --output"
        )


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= 64


def _append(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    try:
        with open(path, "ab", buffering=0) as file:
            files.append_whole(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    except OSError as error:
        raise UserError(f"cannot keep scores in {path}: {error.strerror}") from None


def _checksum(line: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(line).encode())
