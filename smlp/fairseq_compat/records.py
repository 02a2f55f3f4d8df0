"""Files of JSON lines that rank 0 writes if options ask for them: what a run was trained on, how long, and where.

``--data-order-file``: ``{"update": n, "digest": d}``. The digest is a sum over the sequences of all micro-batches of
all ranks, padding left out, so that it does not depend on how the sequences of an update are dealt out; two runs that
see the same tokens in the same order have equal files, and otherwise the first line that differs names the update.

``--update-times-file``: ``{"update": n, "tokens": k, "seconds": s, "data_seconds": w}``: the tokens that the update
predicted on all ranks, the seconds of its training step, and those of waiting for its batches. Validation and saving
are in neither.

``--environment-file``: a line for each start of the run, with versions, machine and revision.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smlp.errors import UserError
from smlp.files import check_writable, regular_file, write_whole
from smlp.launch.environment import environment

logger = logging.getLogger(__name__)

#: entry of a micro-batch's logging output
DIGEST = "data_digest"
_PRIME = (1 << 31) - 1
_BASE = 1_103_515_245  # any large number below the prime
_START, _START_OF_ENVIRONMENT = b'{"update"', b'{"start"'  # of the first line


class Journal:
    """A file of JSON lines, one for each reported update, in order and without repetition after training resumes.

    Opening it drops damaged lines and lines of updates after the one that training resumes from, which a run wrote
    between its last checkpoint and its end. If the file cannot be written, or is of another kind, a warning is logged
    once and training continues.

    Args:
        path: of the file; its folder is made.
        num_updates: updates done before this process.
        what: the content, for the warning.
    """

    def __init__(self, path: Path, num_updates: int, what: str) -> None:
        self.path: Path | None = path
        self.what = what
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                text = regular_file(path).read_bytes()
                _check_kind(text, _START, str(path))
                kept = b"".join(line for line in text.splitlines(keepends=True) if _is_up_to(line, num_updates))
                if kept != text:
                    write_whole(path, kept)
        except (OSError, UserError) as error:
            self._give_up(error)

    def append(self, record: dict[str, Any]) -> None:
        """Append a record, whose ``"update"`` is the number of its update."""
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning(f"no {self.what} from here on: cannot write {self.path}: {error}")
        self.path = None


def _is_up_to(line: bytes, num_updates: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["update"] <= num_updates
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class UpdateRecord:
    """A file with one line for each update, also after training was resumed.

    Args:
        path: of the file.
        what: the content, for the warning if it cannot be written.
    """

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = Path(path), what
        self._journal: Journal | None = None

    def add(self, update: int, **fields: Any) -> None:
        """Write the line of an update; the first one drops lines of later updates, which training does again."""
        if self._journal is None:
            self._journal = Journal(self.path, update - 1, self.what)
        self._journal.append({"update": update, **fields})


def check_record(path: Path, option: str) -> None:
    """Raise ``UserError`` if the file that an option names cannot be written, or is no record; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}") from None
    check_writable(path, option)
    if path.exists():
        with regular_file(path).open("rb") as file:
            start = _START_OF_ENVIRONMENT if option == "--environment-file" else _START
            _check_kind(file.read(len(start)), start, f"{option} {path}")


def check_own_files(paths: Mapping[str, str | Path | None]) -> None:
    """Refuse one file for two records, each of which would drop lines of the other.

    Args:
        paths: by option; None for one that is not given.

    Raises:
        UserError: the message names both options.
    """
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        other = option if path is None else seen.setdefault(Path(path).resolve(), option)
        if other != option:
            raise UserError(f"{other} and {option} both name {path}: give each record a file of its own")


def _check_kind(content: bytes, start: bytes, named: str) -> None:
    """Refuse a file that begins unlike a record: its lines would be lost. A start that was cut off is one."""
    if not content.startswith(start) and not start.startswith(content):
        raise UserError(f"{named}: a file of another kind exists already: name another one")


def digest_of(logging_outputs: Iterable[Mapping[str, Any]]) -> int:
    """Return the digest of an update from those of its micro-batches."""
    return sum(int(output[DIGEST]) for output in logging_outputs) % _PRIME


def digest(tokens_Bn: Tensor, pad: int) -> Tensor:
    """Return a number below 2^31 for a set of sequences (B, n); their order and the padding behind them do not matter.

    It stays on the device of the tokens, and nothing waits for it.
    """
    kept_Bn = tokens_Bn.long() * (tokens_Bn != pad)
    powers_n = _powers(kept_Bn.size(1), tokens_Bn.device)
    row_B = (kept_Bn * powers_n % _PRIME).sum(dim=1) % _PRIME
    return (row_B * row_B % _PRIME).sum() % _PRIME  # squared, so that swapped parts of rows change the sum


@functools.lru_cache(maxsize=8)
def _powers(length: int, device: torch.device) -> Tensor:
    powers, power = [], 1
    for _ in range(length):
        powers.append(power)
        power = power * _BASE % _PRIME
    return torch.tensor(powers, device=device)


def write_environment(path: Path, device: torch.device, world_size: int) -> None:
    """Add the line of a start, on a line of its own also behind one that was cut off.

    Args:
        path: the file.
        device: of rank 0; the others are taken to be alike.
        world_size: number of ranks.

    Raises:
        UserError: the file cannot be written.
    """
    record = {
        "start": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "world_size": world_size,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        **environment(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(max(file.tell() - 1, 0))
            is_cut_off = file.read(1) not in (b"", b"\n")
            file.write(b"\n" * is_cut_off + json.dumps(record).encode() + b"\n")
    except OSError as error:
        raise UserError(f"--environment-file {path} cannot be written: {error.strerror}") from None
