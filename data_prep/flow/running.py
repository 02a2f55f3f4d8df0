"""Run a step part by part, in parallel, and report how it ended.

A part that is done has a file in ``OUT/.state/PHASE/``, written after its outputs (until then it only names them); a
command that is repeated after a kill skips it. Tasks of a Slurm array take a share of the parts each (``--share K/N``)
in the same folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from data_prep.flow.manifest import (
    MANIFEST,
    REPORTS,
    SETTINGS,
    STATE,
    WORK,
    Counts,
    PartResult,
    output_paths,
    read_settings,
)
from data_prep.flow.parts import FilePart
from data_prep.flow.streams import PARTIAL, as_json, noting, read_json, sha256_of, write_bytes
from data_prep.flow.workers import work_on
from smlp.errors import UserError, one_line
from smlp.files import is_held

LOCK = "lock"
_BEGIN_LOCK = "begin.lock"  # held for a moment, by a command that looks at the settings or writes them


class PartWork(Protocol):
    """A function that works on a part: at the top of a module, or a ``functools.partial`` of such a one."""

    def __call__(self, part: FilePart, out: Path) -> PartResult: ...


@dataclass(frozen=True)
class StepRun:
    """The folder of a step, and its processes."""

    out: Path  # the step's folder
    workers: int = 1  # processes; 1 works in this one
    share: tuple[int, int] = (0, 1)  # ``(k, n)``: only every n-th part, from the k-th on (counted from 0)
    quiet: bool = False  # no progress on standard error
    # what run_parts notes of all phases: those of which parts were done before, and the versions of smlp that did any
    resumed: set[str] = field(default_factory=set, compare=False)
    versions: set[str] = field(default_factory=set, compare=False)
    begun: dict[str, Any] = field(default_factory=dict, compare=False)  # what begin has found or written in SETTINGS


@dataclass(frozen=True)
class Finished:
    """Results of all parts in their order, or None while some are missing.

    ``failed`` are sentences of parts that raised :class:`PartFailed`; the other missing ones are of other shares.
    """

    results: list[PartResult] | None
    inputs: list[dict[str, Any]] = field(default_factory=list)
    missing: int = 0
    failed: list[str] = field(default_factory=list)


def begin(
    run: StepRun, step: str, settings: dict[str, Any], restart: bool = False, until_written: Sequence[str] = ()
) -> None:
    """Prepare the folder of a step: a new one, or one that an earlier run with the same settings left, to be continued.

    Args:
        run: how it runs.
        step: its name.
        settings: everything that its output depends on, inputs' paths included.
        restart: throw away what an earlier run with other settings left.
        until_written: settings that may change until the step writes its first file into the folder.

    Raises:
        UserError: the folder was made by another step or with other settings, or holds something else, or the settings
            would change while another command is running there.
    """
    state = run.out / STATE
    own = [path for path in run.out.iterdir() if path.name.startswith(".")] if run.out.is_dir() else []
    inside = (Path(at, name) for path in own for at, folders, files in os.walk(path) for name in (*folders, *files))
    for path in chain(own, inside):
        if path.is_symlink():
            raise UserError(f"{path} is a link: no step made it, and records would go there")
    wanted = {"step": step, "settings": json.loads(json.dumps(settings))}
    content, alone = json.dumps(wanted, indent=1).encode(), replace(run, share=(0, 1), begun={})
    record = state / SETTINGS
    refuse_other_files(run.out)
    state.mkdir(parents=True, exist_ok=True)
    with open(state / _BEGIN_LOCK, "a", opener=_no_link) as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        found = read_settings(record) if record.is_file() else None
        may_differ = () if _holds_files(run.out) else until_written
        if found is None:
            write_bytes(record, content)
        elif found != wanted and _without(found, may_differ) == _without(wanted, may_differ):
            with locked(alone):
                write_bytes(record, content)
        elif found != wanted:
            if not restart:
                raise UserError(
                    f"{run.out} holds work of 'smlp data {found['step']}' with other settings "
                    f"({_difference(found, wanted)}): name another --out, or add --restart to delete that work"
                )
            with locked(alone):
                _throw_away(run.out)
                write_bytes(record, content)
    run.begun.clear()
    run.begun.update(wanted)


def refuse_other_files(out: Path) -> None:
    """Raise UserError if a folder holds files, but no step's record."""
    # list files before the record: another share writes its record first
    if _holds_files(out) and not (out / STATE / SETTINGS).is_file():
        raise UserError(f"--out {out} holds other files: name a new or empty folder")


def _holds_files(out: Path) -> bool:
    return out.is_dir() and any(path.name != STATE for path in out.iterdir())


def _without(record: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    settings = {name: value for name, value in record["settings"].items() if name not in names}
    return {**record, "settings": settings}


def _throw_away(out: Path) -> None:
    """Empty a step's folder.

    What says which files are its own goes last, so that a kill leaves a folder that is recognised.

    Raises:
        UserError: it holds a file that the step did not record; nothing is deleted then.
    """
    records = [path for path in (out / MANIFEST, *(out / STATE).glob("*/*.json")) if path.is_file()]
    known = {MANIFEST}.union(*map(_named, records))
    for path in out.rglob("*"):
        name = path.relative_to(out)
        is_own = name.parts[0] in (STATE, WORK, REPORTS) or str(name) in known
        if not is_own and (path.is_symlink() or not path.is_dir()):
            raise UserError(
                f"--restart would delete {path}, which no record of this step names: move it out of {out}, or remove it"
            )
    last = (out / MANIFEST, out / STATE)
    for path in [*(path for path in out.iterdir() if path not in last), *records, *(out / STATE).iterdir()]:
        if path.name not in (SETTINGS, LOCK, _BEGIN_LOCK):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (out / STATE / SETTINGS).unlink()


def _named(record: Path) -> set[str]:
    """Return the names of the outputs in a manifest or record."""
    names: set[str] = set()
    with contextlib.suppress(KeyError, TypeError):  # damaged: what it named has to be removed by hand
        names.update(row["name"] for row in (read_json(record) or {})["outputs"])
    return names


def note_files(out: Path, names: Iterable[str]) -> None:
    """Record files of a step that are no part's outputs, before they are written.

    Otherwise only the manifest, which an unfinished step lacks, would tell ``--restart`` that they are its own.
    """
    write_bytes(out / STATE / "beside" / "files.json", as_json({"outputs": [{"name": name} for name in names]}))


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    if found["step"] != wanted["step"]:
        return f"the step was {found['step']}"
    old, new = found["settings"], wanted["settings"]
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return "; ".join(f"{name} was {old.get(name)!r}, now {new.get(name)!r}" for name in changed)


def run_parts(
    run: StepRun,
    phase: str,
    parts: Sequence[FilePart],
    work: PartWork,
    depends: Any = None,
    temporary: bool = False,
    follows: str = "",
) -> Finished:
    """Work on the parts that are not done yet.

    Args:
        run: how it runs.
        phase: name of this pass over the parts.
        parts: all of them, also those of other shares.
        work: to be done with each.
        depends: plain values from an earlier phase that the result depends on; a part that was finished with others is
            done again.
        temporary: the outputs may be gone once the step is finished, that is, while its manifest is there. If a part
            has to be done again, the manifest goes, and with it the records of parts without outputs.
        follows: an earlier phase over the same parts, whose results hold only for the files that it has read.

    Returns:
        Results of all parts, and their input files with checksums.

    Raises:
        UserError: a part's own, after the parts at work are finished; or a worker was killed, or a file has changed.
    """
    if not parts:
        raise UserError(f"nothing to do for {run.out}: no input")
    state = run.out / STATE / phase
    state.mkdir(parents=True, exist_ok=True)
    with locked(run):
        index, number = run.share
        mine = [part for position, part in enumerate(parts) if position % number == index]
        key = _key(depends)
        todo = [part for part in mine if _stored(run.out, state, part, key, temporary) is None]
        failed: dict[str, str] = {}  # by the part's name
        if todo:
            (run.out / MANIFEST).unlink(missing_ok=True)  # its presence marks the step as finished
            todo = [part for part in mine if _stored(run.out, state, part, key, temporary) is None]
            before = f", {len(mine) - len(todo)} done before" if len(todo) < len(mine) else ""
            do_part = partial(_do_part, out=run.out, phase=phase, work=work, key=key, follows=follows)
            failed = work_on(todo, do_part, run.workers, f"{phase} ({len(todo)} parts{before})", run.quiet)
    stored = [_stored(run.out, state, part, key, temporary) for part in parts]
    for position, (part, row) in enumerate(zip(parts, stored, strict=True)):
        if row is not None or position % number != index or part.name in failed:
            continue
        if number == 1 or part in todo:  # with shares, another command may have just made it undone
            raise UserError(f"{part.path} changed after it was read: run the same command again")
    missing = sum(row is None for row in stored)
    if missing:
        return Finished(None, missing=missing, failed=[failed[part.name] for part in parts if part.name in failed])
    if len(todo) < len(parts):
        run.resumed.add(phase)
    results = [_result(row) for row in stored]
    run.versions.update(result.smlp for result in results)
    ours = {output["name"] for row in stored for output in row["outputs"]}
    forget(run.out, set(state.glob("*.json")) - {state / f"{part.name}.json" for part in parts}, ours)
    return Finished(results, [row["input"] for row in stored])


def forget(out: Path, records: Iterable[Path], current: set[str]) -> None:
    """Remove records of parts and those of their outputs that are not ``current``.

    Their inputs may be gone, and later steps read everything in the folder.
    """
    for path in records:
        _remove_outputs(out, path, current)
        path.unlink(missing_ok=True)


def _remove_outputs(out: Path, record: Path, current: set[str]) -> None:
    row = read_json(record) or {"outputs": []}  # none if another share was faster
    with contextlib.suppress(KeyError, TypeError):  # damaged: it says nothing of what its outputs were
        for output, place in zip(row["outputs"], output_paths(out, row["outputs"], record), strict=True):
            if output["name"] not in current:
                place.unlink(missing_ok=True)


def is_done(run: StepRun, phase: str, part: FilePart) -> bool:
    """Return whether :func:`run_parts` has nothing to do for a part."""
    return _stored(run.out, run.out / STATE / phase, part, _key(None)) is not None


def _key(depends: Any) -> str:
    return hashlib.sha256(repr(depends).encode()).hexdigest()


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def locked(run: StepRun) -> Iterator[None]:
    """Lock the folder for one command, or for several shares of it, each of them once.

    Raises:
        UserError: another command has the lock, or has changed the settings since this one began.
    """
    index, number = run.share
    state = run.out / STATE
    state.mkdir(parents=True, exist_ok=True)
    own = state / f"share-{index}-of-{number}.lock"
    with open(state / LOCK, "a", opener=_no_link) as whole, open(own, "a", opener=_no_link) as share:
        try:
            fcntl.flock(whole, (fcntl.LOCK_SH if number > 1 else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            fcntl.flock(share, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another command is running in {run.out}: wait for it, or stop it") from None
        except OSError:
            pass  # a file system without locks
        if run.begun and read_json(state / SETTINGS) != run.begun:
            raise UserError(
                f"{run.out} no longer holds the settings of this command: it was removed, or another one began there "
                "meanwhile; name another --out"
            )
        if number == 1:
            for path in run.out.rglob(f"*{PARTIAL}"):  # leftovers of killed processes
                # a command that begins or finishes now holds what it writes, where the file system has locks
                if not path.name.startswith(SETTINGS) and not is_held(path):
                    path.unlink(missing_ok=True)
        yield


def _do_part(part: FilePart, out: Path, phase: str, work: PartWork, key: str, follows: str = "") -> None:
    before, record = part.path.stat(), out / STATE / phase / f"{part.name}.json"
    checksum = sha256_of(part.path, part.start, part.stop)  # first, so that records follow outputs closely
    found = {**_identity(part), "sha256": checksum}
    earlier = read_json(out / STATE / follows / record.name) if follows else {"input": found}
    if earlier is None or earlier.get("input") != found:
        (out / STATE / follows / record.name).unlink(missing_ok=True)  # size and time may be the same
        raise UserError(f"{part.path} changed after it was read: run the same command again")
    names = _named(record)

    def note(path: Path) -> None:
        """Record a file before it is written, so that it is known whatever happens before the part is done."""
        if not (name := str(path.relative_to(out))).startswith("."):
            names.add(name)
            write_bytes(record, as_json({"outputs": [{"name": name} for name in names]}))

    token = noting.set(note)
    try:
        result = work(part, out)
    except Exception:
        _check_same(part, before)  # an earlier phase's results may not hold for it any more
        raise
    finally:
        noting.reset(token)
    result.counts.check()
    _check_same(part, before)
    row = {
        "input": found,
        "mtime_ns": before.st_mtime_ns,
        "depends": key,
        **asdict(result),
        "counts": result.counts.to_json(),
    }
    _remove_outputs(out, record, {output["name"] for output in result.outputs})  # it may have had more
    write_bytes(record, as_json(row))


def _check_same(part: FilePart, before: os.stat_result) -> None:
    after = part.path.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise UserError(f"{part.path} changed while it was read: run the same command again")


def _identity(part: FilePart) -> dict[str, Any]:
    """Return a part's row among a manifest's inputs, without the checksum."""
    row: dict[str, Any] = {"path": str(part.path), "bytes": part.path.stat().st_size}
    if (part.start, part.stop) != (0, None):
        row["range"] = [part.start, row["bytes"] if part.stop is None else part.stop]
    return row


def _stored(out: Path, state: Path, part: FilePart, key: str, temporary: bool = False) -> dict[str, Any] | None:
    """Return the record of a part if its input is unchanged and its outputs are all there (or need not be)."""
    record = state / f"{part.name}.json"
    row = read_json(record)
    if row is None:
        return None
    facts = part.path.stat()
    try:
        identity = {name: value for name, value in row["input"].items() if name != "sha256"}
        same = row["depends"] == key and identity == _identity(part) and row["mtime_ns"] == facts.st_mtime_ns
        outputs = row["outputs"] if not (temporary and (out / MANIFEST).is_file()) else []
        for output, path in zip(outputs, output_paths(out, outputs, record), strict=True):
            same = same and path.is_file() and path.stat().st_size == output["bytes"]
        _result(row).counts.check()
        is_sound = isinstance(row["facts"], dict) and all(isinstance(defect, dict) for defect in row["defects"])
    except (KeyError, TypeError, AttributeError, AssertionError):  # damaged
        return None
    return row if same and is_sound else None


def _result(row: dict[str, Any]) -> PartResult:
    """Return what a part's record says of its result."""
    counts, version = Counts.from_json(row["counts"]), row.get("smlp", "unknown")  # which early versions did not record
    return PartResult(row["outputs"], counts, row["defects"], row["facts"], version)


_OF_DOCUMENTS = ("clean", "dedup")  # steps whose input is documents alone
MAX_DEFECTS = 20  # most defects on the terminal; the manifest has all of them


@dataclass(frozen=True)
class Report:
    """Print the end of a step, timed from here; methods return the exit status, 1 if no document is left."""

    step: str
    run: StepRun
    start: float = field(default_factory=time.perf_counter)

    def finished(self, manifest: dict[str, Any], *lines: str) -> int:
        """Report that all parts are done and the manifest is written; ``lines`` are added."""
        defects = manifest["defects"]
        for defect in defects[:MAX_DEFECTS]:
            print(f"{one_line(defect['problem'])}: {one_line(defect['where'])}")  # may have names that files give
        if len(defects) > MAX_DEFECTS:
            print(f"... {len(defects) - MAX_DEFECTS} more in {MANIFEST}")
        counts = Counts.from_json(manifest["counts"])
        if table := counts.table():
            print(table)
        for line in lines:
            print(line)
        seconds = time.perf_counter() - self.start
        megabytes = sum(_size(row) for row in manifest["inputs"]) / 1e6
        rate = f"{megabytes / max(seconds, 1e-9):,.1f} MB/s with {self.run.workers} workers"
        print(
            f"{self.step}: {len(manifest['outputs'])} files in {self.run.out}; {megabytes:,.1f} MB of files read in "
            f"{seconds:,.1f} s ({'parts were done before' if self.run.resumed else rate})"
        )
        if not counts.kept and (counts.documents_in or self.step in _OF_DOCUMENTS):
            found = f"not one of {counts.documents_in:,} documents was kept" if counts.documents_in else "no documents"
            print(f"smlp: error: {self.run.out}: {found}", file=sys.stderr)
            return 1
        return 0

    def waiting(self, finished: Finished, what: str) -> int:
        """Report that this share is done and others are not: the command must be run again when they are."""
        print(
            f"{self.step}: this share of {what} is done; {finished.missing} parts are left to other shares: run the "
            "command again when they have finished"
        )
        return 0


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a table for the terminal, a line each row; ``right`` are the columns that are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.rjust(width) if at in right else cell.ljust(width) for at, (cell, width) in cells))
    return "\n".join(line.rstrip() for line in lines)


def _size(row: dict[str, Any]) -> int:
    start, stop = row.get("range", (0, row["bytes"]))
    return stop - start
