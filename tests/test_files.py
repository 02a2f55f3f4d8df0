"""Names that come from other files, what may be read and replaced, and folders with one writer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running import REPOSITORY

from smlp import files
from smlp.cli.json_file import check_output, write_json, write_json_lines
from smlp.errors import UserError
from smlp.files import (
    check_writable,
    copy_whole,
    is_locked,
    locked,
    name_below,
    plain_name,
    regular_file,
    renamed_when_whole,
    write_whole,
)

#: names in a file, and whether they stay in its folder
NAMES = {
    "dict.txt": True,
    "experts/update_3_ab/experts_0-3.pt": True,
    "..a": True,
    "/etc/passwd": False,
    "../x": False,
    "a/../../x": False,
    "a/..": False,
    "": False,
    ".": False,
    "..": False,
    "./": False,
    "a\0b": False,
    7: False,
    None: False,
}


@pytest.mark.parametrize(("name", "stays"), NAMES.items())
def test_names_stay_in_their_folder(name, stays: bool) -> None:
    if stays:
        assert name_below(name, "a list") == name
        return
    with pytest.raises(UserError, match=r"^a list names the file .*"):
        name_below(name, "a list")


def test_a_plain_name_has_no_folder() -> None:
    assert plain_name("part-1.gz", "a list") == "part-1.gz"
    with pytest.raises(UserError, match="which has a folder in it"):
        plain_name("a/b", "a list")


def _places(folder: Path) -> dict[str, Path]:
    """What is no regular file, by what a message says of it."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "socket"))
    server.close()
    places = {"folder": folder / "folder", "named pipe": folder / "pipe", "socket": folder / "socket"}
    return {**places, "device": Path("/dev/null")}


def test_only_regular_files_are_read_and_replaced(tmp_path: Path) -> None:
    for what, path in _places(tmp_path).items():
        before = path.stat()
        with pytest.raises(UserError, match=f"{path} is .*{what}"):
            regular_file(path)
        with pytest.raises(UserError, match=f"-o {path} is a {what}"):
            check_writable(path, "-o")
        with pytest.raises(UserError, match=f"{path} is a {what}"):
            write_whole(path, lambda file: file.write(b"x"))
        assert (path.stat().st_ino, path.stat().st_mode) == (before.st_ino, before.st_mode)
    (tmp_path / "link").symlink_to("gone")
    for path, words in {
        tmp_path / "link": "is a link to gone, which does not exist",
        tmp_path / "none": "there is no checkpoint",
        tmp_path / ("n" * 300): "File name too long",
    }.items():
        with pytest.raises(UserError, match=words):
            regular_file(path, "checkpoint")


def test_links_to_streams_are_not_replaced(tmp_path: Path) -> None:
    """Whatever the stream goes to, as with /dev/stdout."""
    link = tmp_path / "stdout"
    with open(tmp_path / "log", "wb") as log:
        link.symlink_to(f"/proc/self/fd/{log.fileno()}")
        for write in (check_writable, lambda path: write_whole(path, lambda file: file.write(b"x"))):
            with pytest.raises(UserError, match="is a stream of this process"):
                write(link)
    assert link.is_symlink()


def test_a_report_is_whole_or_as_before(tmp_path: Path, monkeypatch) -> None:
    """A link or a stream stays one; what cannot be written leaves the older file."""
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    write_json(str(path), {"ok": 1, "checks": []})
    link.symlink_to("a.json")
    write_json(str(link), {"ok": 2, "checks": []})
    assert link.is_symlink() and json.loads(path.read_text()) == {"ok": 2, "checks": []}
    write_json("/dev/null", {"ok": True, "checks": []})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=rf"cannot write {path}: No space left .* the files saved before are untouched"):
        write_json(str(path), {"ok": 3, "checks": []})
    assert json.loads(path.read_text()) == {"ok": 2, "checks": []} and len(list(tmp_path.iterdir())) == 2


def test_a_reason_without_a_number_is_said(tmp_path: Path) -> None:
    def refuse(file) -> None:
        raise OSError("encoder error -2")

    with pytest.raises(UserError, match=r"cannot write .*: encoder error -2 \("):
        write_whole(tmp_path / "a.png", refuse)


def test_a_folder_that_was_moved_leaves_the_lock_of_the_next(tmp_path: Path) -> None:
    """The next is locked by another process, or under another name."""
    with locked(tmp_path / "run", "run"):
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        (tmp_path / "run").mkdir()
        later = locked(tmp_path / "run", "run")
        later.__enter__()
    assert is_locked(tmp_path / "run")
    later.__exit__(None, None, None)
    assert not is_locked(tmp_path / "run")


def test_a_lock_that_cannot_be_made_leaves_no_folders(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "a" / "b"):
        with pytest.raises(UserError, match=r"cannot write to .*: File name too long"):
            locked(folder / ("n" * 300), "run").__enter__()
        assert list(tmp_path.iterdir()) == []


def test_a_link_is_no_lock(tmp_path: Path) -> None:
    """What it leads to would be written over."""
    (tmp_path / "mine").write_text("something of value")
    (tmp_path / ".lock").symlink_to("mine")
    with pytest.raises(UserError, match=f"cannot write to {tmp_path}: "), locked(tmp_path, "run"):
        pass
    assert (tmp_path / "mine").read_text() == "something of value"


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch) -> None:
    """Permissions do not hold for root, so they are refused here by hand."""

    def denied(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.pt").touch()
    monkeypatch.setattr(files, "open", denied, raising=False)
    with pytest.raises(UserError, match=r"^cannot read .*a\.pt: Permission denied$"):
        regular_file(tmp_path / "a.pt")


@pytest.mark.parametrize("length", [251, 300])
def test_names_that_are_too_long_are_refused_before_work(tmp_path: Path, length: int) -> None:
    """Also those that only have no room for the end of a temporary name."""
    with pytest.raises(UserError, match="File name too long"):
        check_writable(tmp_path / ("n" * length))
    check_writable(tmp_path / ("n" * 200))


HOLDER = """
import os, sys, time
from smlp.files import locked
with locked(sys.argv[1], "run"):
    if os.fork() == 0:  # it has let the lock go before it says anything
        print(os.getpid(), end="", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_no_lock_even_to_its_children(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": REPOSITORY}
    )
    child = int(os.read(holder.stdout.fileno(), 20))
    try:
        assert is_locked(tmp_path)
        words = rf"another run is running in --save-dir {tmp_path} \(process {holder.pid} on .*\): wait"
        with pytest.raises(UserError, match=words), locked(tmp_path, "run", "--save-dir", ": wait"):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)  # it lives
        with locked(tmp_path, "run"):
            assert is_locked(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
    assert not is_locked(tmp_path) and list(tmp_path.iterdir()) == []


def test_a_look_at_a_lock_keeps_nobody_out(tmp_path: Path, monkeypatch) -> None:
    """The look ends while the other process waits."""
    look = open(tmp_path / ".lock", "w")  # noqa: SIM115
    fcntl.flock(look, fcntl.LOCK_SH)
    monkeypatch.setattr(files.time, "sleep", lambda _: look.close())
    with locked(tmp_path, "run"):
        assert is_locked(tmp_path)


def test_processes_of_one_number_on_two_machines_write_two_files(tmp_path: Path, monkeypatch) -> None:
    names = set()
    for machine in ("node1", "node2", "n" * 64):
        monkeypatch.setattr(files.socket, "gethostname", lambda machine=machine: machine)
        write_whole(tmp_path / "crash.pt", lambda file: names.add(file.name))
    assert len(names) == 3 and [path.name for path in tmp_path.iterdir()] == ["crash.pt"]


def test_without_locks_a_warning_is_all(tmp_path: Path, monkeypatch, caplog) -> None:
    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", none)
    with locked(tmp_path, "run"), locked(tmp_path, "run"):
        assert not is_locked(tmp_path)
    assert "cannot be locked (Operation not supported)" in caplog.text


def test_a_copy_of_what_is_not_there_names_the_source(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        copy_whole(tmp_path / "gone", tmp_path / "copy")
    (tmp_path / "bad").symlink_to("/proc/self/mem")  # it cannot be read
    with pytest.raises(OSError, match="error") as caught:
        copy_whole(tmp_path / "bad", tmp_path / "copy")
    assert caught.value.filename == str(tmp_path / "bad") and not (tmp_path / "copy").exists()


def test_a_failed_write_names_the_file_and_leaves_the_older_one(tmp_path) -> None:
    """The error of a write on a full disk has no name of its own."""
    target = tmp_path / "train.bin"
    target.write_text("older")
    with pytest.raises(OSError, match="No space left") as caught, renamed_when_whole(tmp_path / "new", target) as file:
        file.write(b"newer")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(target)
    assert [path.name for path in tmp_path.iterdir()] == ["train.bin"]
    assert target.read_text() == "older"


@pytest.mark.parametrize(
    ("option", "content", "is_ours"),
    [
        ("--json", '{\n "ok": true,\n "checks": []\n}', True),
        ("--json", '[\n {\n  "run": "runs/a-s1",\n  "state": "done"', True),
        ("--json", "", True),
        ("--json", "[]", True),
        ("--json", '{"settings": {"ok": 1}, "tasks": {}}', True),
        ("--json", '{"settings": {"ok": 1}, "editor": {}}', False),
        ("--json", '{"files": ["a.ts"], "include": []}', False),
        ("--json", '{"name": "package", "version": "1.0"}', False),
        ("--json", '{"name": "q", "title": "an experiment"}', False),
        ("--json", '{"metadata": {"total_size": 1}, "weight_map": {}}', False),
        ("--json", '{"ok": true}', False),
        ("--json", '{"prompt": "x", "index": 0}', False),
        ("--output", '{"prompt": "a \\"b\\", {c", "index": 0, "text": ""}\n', True),
        ("--output", '{"id": "1", "text": "of a corpus"}\n', False),
        ("--output", '{"prompt": "of a corpus", "completion": ""}\n', False),
        ("--output", '{"ok": true, "checks": []}', False),
        ("--trace", '{\n  "schemaVersion": 1,\n  "deviceProperties": [\n', True),
        ("--trace", '{"traceEvents": []}', False),
    ],
)
def test_only_older_results_are_written_over(option, content, is_ours, tmp_path):
    path = tmp_path / "file"
    path.write_text(content)
    if is_ours:
        check_output(option, str(path))
    else:
        with pytest.raises(UserError, match=f"{option} .*file: a file of another kind exists already"):
            check_output(option, str(path))


def test_a_result_can_be_written_again(tmp_path):
    """What a command writes must be known as its own: a new kind of result is added to the known ones."""
    for write in (
        lambda: write_json(str(tmp_path / "a"), {"new": 1}),
        lambda: write_json_lines("-o", "b", [{"new": 1}]),
    ):
        with pytest.raises(AssertionError, match=r"add the beginning of \{"):
            write()


def test_a_copy_that_fails_once_is_whole(tmp_path, monkeypatch) -> None:
    content, copy = bytes(range(256)) * 8, files.shutil.copyfileobj

    def breaks_off(source, target, size) -> None:
        monkeypatch.setattr(files.shutil, "copyfileobj", copy)
        target.write(source.read(1000))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(files.shutil, "copyfileobj", breaks_off)
    (tmp_path / "source").write_bytes(content)
    copy_whole(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content


def test_an_error_of_a_file_that_is_read_names_it(tmp_path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        files.read_bytes(tmp_path)
    assert str(caught.value.filename) == str(tmp_path)
    with pytest.raises(OSError, match="it is a device"):  # which need not end
        files.read_bytes("/dev/zero")
    (tmp_path / "file").write_bytes(b"a\r\nb")
    assert files.read_bytes(str(tmp_path / "file")) == b"a\r\nb"
