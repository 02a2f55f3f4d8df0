"""Write files atomically, lock folders, and check file names that come from other files.

An error of the operating system becomes a :class:`~smlp.errors.UserError` of one sentence.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import math
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from smlp.errors import UserError

logger = logging.getLogger(__name__)

# Errors of network file systems that may be temporary; on a full disk a second attempt would only lose time.
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}
_ATTEMPTS = 3
_PAUSE_SECONDS = 2.5
_LOOKS, _LOOK_SECONDS = 20, 0.01  # for is_held(), which holds a lock as long as it looks
_LOCK = ".lock"
_MOST_NAME = 255  # bytes


def name_below(name: object, named_by: str) -> str:
    """Return a file name that was read from another file, if it stays below its folder.

    Args:
        name: relative name that was read.
        named_by: the file or record that it was read from, for the message.

    Raises:
        UserError: it is absolute, has a "..", or is no file name at all.
    """
    if not isinstance(name, str) or not name.strip("./") or any(sign in name for sign in "\0\n\r") or _is_odd(name):
        raise UserError(f"{named_by} names the file {name!r}, which is not a file name")
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise UserError(f"{named_by} names the file {name!r}, which would lie outside its folder")
    return name


def _is_odd(name: str) -> bool:
    """Return whether a part of a name is too long for a file system or cannot be encoded."""
    try:
        return any(len(os.fsencode(part)) > _MOST_NAME for part in name.split("/"))
    except UnicodeEncodeError:
        return True


def plain_name(name: object, named_by: str) -> str:
    """Return a file name that was read from another file, if it has no folder in it.

    Raises:
        UserError: it has one, or as :func:`name_below`.
    """
    if "/" in name_below(name, named_by):
        raise UserError(f"{named_by} names the file {name!r}, which has a folder in it")
    return name


def check_path(path: Any, what: str) -> None:
    """Raise ``UserError`` if what should be a path is of another type."""
    if not isinstance(path, (str, os.PathLike)):
        raise UserError(f"a {what} must be a path, got {path!r:.40}")


def regular_file(path: str | Path, what: str = "file") -> Path:
    """Return the path of a regular file that may be read.

    A named pipe, on which reading could block for ever, and a device are refused.

    Args:
        path: of the file.
        what: kind of file that is wanted, for the message.

    Raises:
        UserError: it is missing, a folder, no regular file, may not be read, or is no path at all.
    """
    check_path(path, what)
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb"):
                return path
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise UserError(f"{path} is a link to {os.readlink(path)}, which does not exist") from None
        raise UserError(f"there is no {what} {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{str(path)!r} is not a file name: {error}") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder: name {_one(what)} in it")
    raise UserError(f"{path} is not a regular file but a {kind_of(mode)}: name {_one(what)}")


def _one(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a file, which may be a pipe (``<(command)`` in a shell) that something writes to.

    Raises:
        OSError: it cannot be read, is a pipe that nothing writes to, or a device, which may never end.
    """
    with NamedFile(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        content, mode = b"", os.fstat(file.fileno()).st_mode
        if stat.S_ISCHR(mode) and not file.isatty():
            raise OSError(errno.ENODEV, "it is a device", str(path))
        if stat.S_ISFIFO(mode):
            content = file.read(1)  # None if a writer has not written yet
            if content == b"":
                raise OSError(errno.EPIPE, "nothing writes to this pipe", str(path))
        os.set_blocking(file.fileno(), True)
        return (content or b"") + file.readall()


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """Return the content of a text file, with every kind of line end as ``\\n``.

    Raises:
        OSError: as :func:`read_bytes`.
        UnicodeDecodeError: the file is in another encoding.
    """
    return text_of(read_bytes(path), encoding)


def text_of(content: bytes, encoding: str = "utf-8") -> str:
    """Return the text in the content of a file, with every kind of line end as ``\\n``.

    Raises:
        UnicodeDecodeError: it is in another encoding; the error says where in the content.
    """
    try:
        return io.StringIO(content.decode(encoding), newline=None).read()
    except UnicodeDecodeError as error:
        mark = len(content) - len(error.object)  # utf-8-sig counts from the end of a byte-order mark
        raise UnicodeDecodeError(encoding, content, error.start + mark, error.end + mark, error.reason) from None


def append_whole(file: io.FileIO, content: bytes) -> None:
    """Write all of the content or nothing of it: a disk that is getting full takes a part without an error."""
    written = 0
    try:
        while written < len(content):
            written += file.write(content[written:]) or 0
    except OSError:
        if file.seekable():
            file.truncate(file.tell() - written)
        raise


def number_of(text: str) -> float:
    """Return the number that a text of a user's file is, NaN if it is none; unlike Python, without 1_000 and ``१``."""
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def check_folder(path: str | Path, option: str, what: str) -> None:
    """Refuse a folder for what a command writes, ``what``, that cannot be made or written to.

    Raises:
        UserError: the message names the option.
    """
    if os.path.exists(path) and not os.path.isdir(path):
        raise UserError(f"{option} {path} is a file: name a folder for {what}")
    if problem := not_writable(Path(path)):
        raise UserError(f"{option}: {problem}")


def not_writable(folder: Path) -> str:
    """Say why nothing can be written to a folder that may not exist yet; "" if it can."""
    try:
        place = existing(folder)
    except OSError as error:
        return f"{folder} cannot be reached: {error.strerror}"
    if not place.is_dir():
        return f"{folder} cannot be made: {place} is not a folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written to"


def existing(place: Path) -> Path:
    """Return a place, or the closest folder above it that exists."""
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def check_no_other(folder: Path, names: Iterable[str], option: str = "--out") -> None:
    """Refuse a folder with files that a command would replace, but did not write.

    Raises:
        UserError: the message names the first one.
    """
    if held := next((name for name in names if not is_missing(folder / name)), None):
        raise UserError(f"{option} {folder} has a {held} of something else: name another folder")


def is_safetensors(path: str | Path) -> bool:
    """Return whether a file is one of safetensors, by its name."""
    return Path(path).suffix.lower() == ".safetensors"


def is_missing(path: str | Path) -> bool:
    """Return whether nothing exists under a name, as far as this process may see."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def kind_of(mode: int) -> str:
    """Return in words what kind of file an ``st_mode`` describes."""
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "regular file" if stat.S_ISREG(mode) else "device")


def check_writable(target: str | Path, option: str = "") -> None:
    """Check, before long work, that :func:`write_whole` can write a file.

    Args:
        target: name of the file.
        option: the option that gave the name, for the message.

    Raises:
        UserError: something other than a regular file lies there, the name is too long, or its folder is missing or
            not writable.
    """
    target, named = Path(target), f"{option} {target}".strip()
    try:
        os.stat(target.parent)
        _check_replaceable(target, named)
        with contextlib.suppress(FileNotFoundError):
            os.stat(temporary_name(target))  # the temporary name is longer
    except OSError as error:
        raise UserError(f"cannot write {named}: {error.strerror}") from None
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"cannot write {named!r}: {error}") from None
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {named}: {target.parent} may not be written to")


def _check_replaceable(target: Path, named: str) -> None:
    """Raise for a device, a named pipe, a folder, or a name such as /dev/stdout, which a file must not replace."""
    if target.is_symlink() and os.readlink(target).startswith("/proc/"):
        raise UserError(f"{named} is a stream of this process, which is not replaced: name another file to write")
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(target).st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{named} is a folder: name a file to write")
        if not stat.S_ISREG(mode):
            raise UserError(f"{named} is a {kind_of(mode)}, which is not replaced: name another file to write")


def missing_folders(path: Path) -> list[Path]:
    """Return the folders above a path that are not there yet, the innermost first."""
    return [folder for folder in path.parents if not os.path.exists(folder)]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of some folders that are empty, after what made them has failed."""
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):  # where others have written meanwhile
            folder.rmdir()


@contextlib.contextmanager
def locked(folder: str | Path, who: str, option: str = "", remedy: str = "") -> Iterator[None]:
    """Hold a lock on a folder, which is made if it is missing, and removed again if nothing is written to it.

    Folders above it stay once it is locked. The operating system releases the lock when the process ends, however it
    ends. Forked processes do not inherit it.
    If the file system has no locks, a warning is logged and the block runs.

    Args:
        folder: to lock.
        who: the kind of process that holds the lock, for the message to another process.
        option: the option that gave the folder, for the message.
        remedy: end of that message.

    Raises:
        UserError: another process is at work there, or the folder cannot be written to.
    """
    folder, named = Path(folder), f"{option} {folder}".strip()
    new = missing_folders(folder / _LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _opened_lock(folder / _LOCK)
    except BlockingIOError as error:
        raise UserError(f"another {who} is running in {named} ({error.strerror}){remedy}") from None
    except OSError as error:
        remove_empty(new)
        raise UserError(f"cannot write to {named}: {error.strerror}") from None
    try:
        yield
    finally:
        if lock in _held:  # a forked process does not hold it
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(folder / _LOCK), os.fstat(lock)):  # the folder may have been moved
                    os.unlink(folder / _LOCK)
                    if folder in new:
                        folder.rmdir()  # if nothing was written
            _held.remove(lock)
            os.close(lock)


def _opened_lock(path: Path) -> int:
    """Open and lock a file.

    Raises:
        BlockingIOError: another process holds it; ``strerror`` says which.
        OSError: the file cannot be opened.
    """
    looks = 0
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            error.strerror = os.read(lock, 200).decode(errors="replace").strip() or "an unknown process"
            os.close(lock)
            if (looks := looks + 1) == _LOOKS:
                raise
            time.sleep(_LOOK_SECONDS)
            continue
        except OSError as error:
            logger.warning(f"{path.parent} cannot be locked ({error.strerror}): let no other process write there")
        _held.add(lock)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(lock)):
                with contextlib.suppress(OSError):  # on a full disk only the message to other processes is incomplete
                    os.ftruncate(lock, 0)
                    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return lock
        # The previous owner has just removed the file: try again.
        _held.remove(lock)
        os.close(lock)


def is_locked(folder: str | Path) -> bool:
    """Return whether a process holds a folder with :func:`locked`."""
    return is_held(Path(folder) / _LOCK)


def is_held(file: str | Path) -> bool:
    """Return whether a process holds a lock on a file, as it does on one that :func:`write_whole` is writing."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


#: descriptors of this process's locks
_held: set[int] = set()


def _let_go() -> None:
    """Close the parent's locks in a forked process; otherwise they would last until both processes have ended."""
    for lock in _held:
        with contextlib.suppress(OSError):
            os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


class NamedFile(io.FileIO):
    """A file whose errors name it, as those of ``open`` do."""

    def write(self, content: Any) -> int | None:
        with self._named():
            return super().write(content)

    def readinto(self, buffer: Any) -> int | None:
        with self._named():
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self._named():
            return super().readall()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self.name)
            raise


def copy_whole(source: str | Path, target: str | Path) -> None:
    """Copy a file; at every moment ``target`` is either what it was or a complete copy.

    Raises:
        UserError: the copy cannot be written.
        OSError: the source cannot be read.
    """
    with io.BufferedReader(NamedFile(source)) as original:

        def copy(file: BinaryIO) -> None:
            original.seek(0)  # another attempt begins anew
            shutil.copyfileobj(original, file, 1 << 20)

        write_whole(target, copy)


def write_whole(target: str | Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a temporary file next to ``target``, force it to the disk, and rename it to ``target``.

    Args:
        target: name of the file.
        content: bytes, or a function that writes to the open file. It is called again after an error that may pass.

    Raises:
        UserError: the file cannot be written; the temporary file is removed and an older ``target`` untouched.
        OSError: ``content`` cannot read what it writes.
    """
    target = Path(target)
    temporary = temporary_name(target)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _check_replaceable(target, str(target))
            with renamed_when_whole(temporary, target) as file:
                file.write(content) if isinstance(content, bytes) else content(file)
            return
        except Exception as error:
            cause = _os_error(error)
            if cause is None:
                raise
            if cause.errno in _TRANSIENT and attempt < _ATTEMPTS:
                time.sleep(_PAUSE_SECONDS)
            elif str(cause.filename or target) not in (str(target), str(temporary)):  # of what it reads
                raise
            else:
                raise UserError(_cannot_write(target, cause)) from error


def temporary_name(target: Path, ending: str = ".tmp") -> Path:
    """Return the name under which a file is written until it is complete: ``NAME.MACHINE.PROCESS`` and the ending."""
    # It separates ranks that save the same name at once, as fairseq does with crash.pt; their ids may be the same on
    # two machines. A machine's own name may have 64 bytes.
    machine = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    return target.with_name(f"{target.name}.{machine}.{os.getpid()}{ending}")


@contextlib.contextmanager
def renamed_when_whole(temporary: Path, target: Path) -> Iterator[BinaryIO]:
    """Open a file that is forced to the disk and renamed to ``target`` when the block ends, or removed if it fails."""
    try:
        with open(temporary, "wb") as file:
            with contextlib.suppress(OSError):  # it says that the file is no leftover; some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)  # waits no longer than is_held() looks
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)  # before the lock ends with the file, so that it is never a leftover
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:  # a failed write does not name its file
            error.filename = str(target)
        raise
    # The new name is on disk only once the directory is synced, which some file systems cannot do.
    with contextlib.suppress(OSError):
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _os_error(error: BaseException | None) -> OSError | None:
    """Return the operating system's error behind another; torch's file writer raises its own when it closes."""
    while error is not None and not isinstance(error, UserError):
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _cannot_write(target: Path, error: OSError) -> str:
    try:
        free = f"{shutil.disk_usage(target.parent).free:,} bytes free on that disk"
    except OSError:
        free = "that directory is gone"
    reason = error.strerror or ", ".join(map(str, error.args))  # other libraries raise it without a number
    return f"cannot write {target}: {reason} ({free}); the files saved before are untouched"


def project_folder() -> Path:
    """Return the folder with ``examples/`` and ``scripts/slurm/``: the clone, or a wheel's copy of both."""
    package = Path(__file__).resolve().parent
    return package.parent if (package.parent / "examples" / "recipe.sh").is_file() else package / "project"
