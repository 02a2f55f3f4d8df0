"""Files that are either whole or absent, folders with one writer, and names that come from other files.

An operating system that refuses is one clear sentence.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from smlp.errors import UserError

logger = logging.getLogger(__name__)

# A second attempt can help with these (network file systems); with a full disk it only loses time.
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}
_ATTEMPTS = 3
_PAUSE_SECONDS = 2.5
_LOCK = ".lock"
_MOST_NAME = 255  # bytes


def name_below(name: object, named_by: str) -> str:
    """Return a file name that was read from another file, if it stays in the folder that it is relative to.

    Args:
        name: what was read.
        named_by: the file or record that it was read from, for the message.

    Raises:
        UserError: it is absolute, climbs with "..", or is no file name at all.
    """
    if not isinstance(name, str) or not name.strip("./") or any(sign in name for sign in "\0\n\r") or _is_odd(name):
        raise UserError(f"{named_by} names the file {name!r}, which is no name of a file")
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise UserError(f"{named_by} names the file {name!r}, which would lie outside its folder")
    return name


def _is_odd(name: str) -> bool:
    """Whether a part of a name is too long for a file system, or has half a character."""
    try:
        return any(len(os.fsencode(part)) > _MOST_NAME for part in name.split("/"))
    except UnicodeEncodeError:
        return True


def plain_name(name: object, named_by: str) -> str:
    """Return a file name that was read from another file, if it names a file right in a folder.

    Raises:
        UserError: as :func:`name_below`, or it has a folder in it.
    """
    if "/" in name_below(name, named_by):
        raise UserError(f"{named_by} names the file {name!r}, which would lie outside its folder")
    return name


def regular_file(path: str | Path, what: str = "file") -> Path:
    """Return the path of a regular file that may be read.

    A named pipe, for which reading would wait for ever, and a device are refused.

    Args:
        path: of the file.
        what: it should be, for the message.

    Raises:
        UserError: it is missing, a folder, no regular file, or may not be read.
    """
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
        raise UserError(f"{str(path)!r} is no name of a file: {error}") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder: name a {what} in it")
    raise UserError(f"{path} is no regular file but a {kind_of(mode)}: name a {what}")


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a file. It may be a pipe (``<(command)`` in a shell), if something writes to it.

    Raises:
        OSError: it cannot be read, or is a pipe that nothing writes to.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        content = b""
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            content = file.read(1)  # None where there is a writer that has not written yet
            if content == b"":
                raise OSError(errno.EPIPE, "nothing writes to this pipe", str(path))
        os.set_blocking(file.fileno(), True)
        return (content or b"") + file.read()


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """Return the content of a text file, with any kind of line end as ``\\n``.

    Raises:
        OSError: as :func:`read_bytes`.
        UnicodeDecodeError: the file is in another encoding.
    """
    return io.StringIO(read_bytes(path).decode(encoding), newline=None).read()


def is_missing(path: str | Path) -> bool:
    """Whether there is nothing under a name, as far as this process may look."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def kind_of(mode: int) -> str:
    """What a path is, in words, by the ``st_mode`` of its status."""
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "regular file" if stat.S_ISREG(mode) else "device")


def check_writable(target: str | Path, option: str = "") -> None:
    """Refuse a name to which :func:`write_whole` could not write: to be called before long work.

    Args:
        target: where a file is to be written.
        option: that names it, for the message.

    Raises:
        UserError: something else than a regular file lies there, the name is too long, or its folder is missing or
            cannot be written to.
    """
    target, named = Path(target), f"{option} {target}".strip()
    try:
        os.stat(target.parent)
        _check_replaceable(target, named)
        with contextlib.suppress(FileNotFoundError):
            os.stat(_temporary(target))  # which has the longer name
    except OSError as error:
        raise UserError(f"cannot write {named}: {error.strerror}") from None
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"cannot write {named!r}: {error}") from None
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {named}: {target.parent} may not be written to")


def _check_replaceable(target: Path, named: str) -> None:
    """Refuse to put a file in the place of a device, a named pipe or a folder, or of a name such as /dev/stdout."""
    if target.is_symlink() and os.readlink(target).startswith("/proc/"):
        raise UserError(f"{named} is a stream of this process, which is not replaced: name another file to write")
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(target).st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{named} is a folder: name a file to write")
        if not stat.S_ISREG(mode):
            raise UserError(f"{named} is a {kind_of(mode)}, which is not replaced: name another file to write")


@contextlib.contextmanager
def locked(folder: str | Path, who: str, option: str = "", remedy: str = "") -> Iterator[None]:
    """Let one process at a time work in a folder, which is made if it is missing.

    The system gives the lock back when the process ends, however it ends. Processes that are forked do not inherit it.
    Where the file system has no locks, a warning says so and work begins.

    Args:
        folder: of the work.
        who: works there, for the message to another process.
        option: that names the folder, for the message.
        remedy: the end of that message.

    Raises:
        UserError: another process is at work there, or the folder cannot be written to.
    """
    folder, named = Path(folder), f"{option} {folder}".strip()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _opened_lock(folder / _LOCK)
    except BlockingIOError as error:
        raise UserError(f"another {who} is at work in {named} ({error.strerror}){remedy}") from None
    except OSError as error:
        raise UserError(f"cannot write to {named}: {error.strerror}") from None
    try:
        yield
    finally:
        if lock in _held:  # not in a process that was forked
            with contextlib.suppress(OSError):
                os.unlink(folder / _LOCK)
            _held.remove(lock)
            os.close(lock)


def _opened_lock(path: Path) -> int:
    """Open the file of a lock that nobody else holds.

    Raises:
        BlockingIOError: another process holds it; ``strerror`` says which.
        OSError: the file cannot be opened.
    """
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            error.strerror = os.read(lock, 200).decode(errors="replace").strip() or "an unknown process"
            os.close(lock)
            raise
        except OSError as error:
            logger.warning(f"{path.parent} cannot be locked ({error.strerror}): let no other process write there")
        _held.add(lock)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(lock)):
                with contextlib.suppress(OSError):  # on a full disk, only the message to others lacks it
                    os.ftruncate(lock, 0)
                    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return lock
        # its owner has just removed it
        _held.remove(lock)
        os.close(lock)


def is_locked(folder: str | Path) -> bool:
    """Whether a process is at work in a folder, under :func:`locked`."""
    try:
        with open(Path(folder) / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


#: descriptors of the locks of this process
_held: set[int] = set()


def _let_go() -> None:
    """In a forked process: close the locks of its parent, which would otherwise last as long as both live."""
    for lock in _held:
        with contextlib.suppress(OSError):
            os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def copy_whole(source: str | Path, target: str | Path) -> None:
    """Copy a file so that ``target`` is at every moment either what it was or a complete copy.

    Raises:
        UserError: the copy cannot be written.
    """

    def write(file: BinaryIO) -> None:
        with open(source, "rb") as original:
            shutil.copyfileobj(original, file, 1 << 20)

    write_whole(target, write)


def write_whole(target: str | Path, write: Callable[[BinaryIO], None]) -> None:
    """Call ``write`` with a temporary file beside ``target``, force it to the disk, rename it to ``target``.

    Raises:
        UserError: the operating system refused; the temporary file is gone and an older ``target`` is untouched.
    """
    target = Path(target)
    temporary = _temporary(target)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _write_and_rename(temporary, target, write)
            return
        except Exception as error:
            cause = _os_error(error)
            if cause is None:
                raise
            if cause.errno not in _TRANSIENT or attempt == _ATTEMPTS:
                raise UserError(_cannot_write(target, cause)) from error
            time.sleep(_PAUSE_SECONDS)


def _temporary(target: Path) -> Path:
    """The name under which a file is written until it is complete."""
    # The process id keeps ranks apart that save the same name at once, as fairseq does with crash.pt.
    return target.with_name(f"{target.name}.{os.getpid()}.tmp")


def _write_and_rename(temporary: Path, target: Path, write: Callable[[BinaryIO], None]) -> None:
    _check_replaceable(target, str(target))
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    # The new name is on the disk only when the directory is. Some file systems cannot sync one: then it follows later.
    with contextlib.suppress(OSError):
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _os_error(error: BaseException | None) -> OSError | None:
    """The operating system's error behind one of torch, whose file writer raises its own while it closes."""
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
    return f"cannot write {target}: {error.strerror} ({free}); the files saved before are untouched"
