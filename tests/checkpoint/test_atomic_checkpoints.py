"""A run killed at any moment, or stopped by a full disk, leaves the last good checkpoint loadable."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from running import TINY_LM, USER_DIR, run_python

from smlp import files
from smlp.errors import UserError
from smlp.fairseq_compat import saving

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

# Starts a training run in a fork, lets it save a few times, kills it a random moment after it began to save once more
# (a checkpoint has its first name, and the others are being written), and tries to load every checkpoint it left; again
# and again, going on from what the killed run left.
KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path

import fairseq_cli.train, torch, torch._dynamo

save_dir, kills, arguments = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
draw = random.Random(1)
report = []
for kill in range(kills):
    seen = set(save_dir.glob("checkpoint_?_*.pt"))
    child = os.fork()
    if child == 0:
        log = os.open(f"{save_dir}.{kill}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["fairseq-train", *arguments]
        try:
            fairseq_cli.train.cli_main()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    limit = time.monotonic() + 30
    saves = draw.randint(2, 4)
    while saves:
        if os.waitpid(child, os.WNOHANG)[0] or time.monotonic() > limit:
            sys.exit(Path(f"{save_dir}.{kill}.log").read_text())
        new = set(save_dir.glob("checkpoint_?_*.pt")) - seen
        seen |= new
        saves -= bool(new)
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for path in sorted(save_dir.glob("checkpoint*.pt")):
        try:
            updates = torch.load(path)["optimizer_history"][-1]["num_updates"]
        except Exception as error:
            updates = f"{type(error).__name__}: {error}"
        report.append([kill, path.name, updates])
print(json.dumps(report))
"""


@pytest.mark.slow
def test_killed_runs_leave_only_whole_checkpoints(tiny_data: Path, tmp_path: Path) -> None:
    save_dir = tmp_path / "save"
    big = ["--decoder-embed-dim", "256", "--decoder-ffn-embed-dim", "4096"]  # some 25 MB a checkpoint
    often = ["--save-interval-updates", "1", "--keep-interval-updates", "2", "--disable-validation"]
    arguments = [tiny_data, "--user-dir", USER_DIR, *TINY_LM, *big, *often, "--save-dir", save_dir]
    script = tmp_path / "killer.py"
    script.write_text(KILLER)
    kills = 4
    run = run_python(script, save_dir, str(kills), *arguments, timeout=150)
    assert run.rc == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    unreadable = [entry for entry in report if not isinstance(entry[2], int)]
    assert not unreadable
    updates = [count for _, name, count in report if name == "checkpoint_last.pt"]
    assert len(updates) == kills
    assert updates == sorted(updates), "a later run went on from where the one before it was killed"
    assert updates[-1] > updates[0]
    # what a killed run left half-written is gone after the next start, so at most the last one is left
    assert len(list(save_dir.glob("*.tmp"))) <= 1


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_costs_nothing(tiny_data: Path, tmp_path: Path, run_fairseq_many) -> None:
    """The kernel refuses to write beyond a size between that of the first checkpoint and nothing."""
    save_dir = tmp_path / "save"
    arguments = [tiny_data, "--user-dir", USER_DIR, *TINY_LM, "--save-dir", save_dir]
    train = {"tool": "train", "args": [*arguments, "--max-update", "2"]}
    assert run_fairseq_many([train])[0].rc == 0
    before = {path.name: path.read_bytes() for path in save_dir.iterdir()}
    assert set(before) == {"checkpoint_best.pt", "checkpoint_last.pt"}

    limit = len(before["checkpoint_last.pt"]) // 2
    (run,) = run_fairseq_many([{**train, "args": [*arguments, "--max-update", "4"], "file_size_limit": limit}])
    assert run.rc == 1
    (sentence,) = run.errors
    assert sentence.startswith("smlp: error: cannot write ")
    for part in ("checkpoint_best.pt", os.strerror(errno.EFBIG), "bytes free", "untouched"):
        assert part in sentence
    assert {path.name: path.read_bytes() for path in save_dir.iterdir()} == before
    for name in before:
        torch.load(save_dir / name)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint_last.pt"
    saving.save_whole({"step": 1}, str(target))

    def half(file) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match=r"checkpoint_last\.pt: No space left on device \([\d,]+ bytes free"):
        files.write_whole(target, half)
    assert torch.load(target) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_last.pt"]


def test_the_copy_is_never_seen_half_done(tmp_path: Path, monkeypatch) -> None:
    """While the copy is being written, its target is still the old file."""
    source, target = tmp_path / "checkpoint_best.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new" * 1000)
    target.write_bytes(b"old")
    copy, seen = files.shutil.copyfileobj, []

    def watched(*arguments) -> None:
        seen.append(target.read_bytes())
        copy(*arguments)
        seen.append(target.read_bytes())

    monkeypatch.setattr(files.shutil, "copyfileobj", watched)
    files.copy_whole(source, target)
    assert seen == [b"old", b"old"]
    assert target.read_bytes() == source.read_bytes()


def test_fairseq_copies_through_us(tmp_path: Path) -> None:
    from fairseq import checkpoint_utils

    from smlp.fairseq_compat import apply

    apply()
    source, target = tmp_path / "a.pt", tmp_path / "b.pt"
    source.write_bytes(b"x")
    inode_before = target.touch() or target.stat().st_ino
    assert checkpoint_utils.PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"x"
    assert target.stat().st_ino != inode_before, "the old file was written over in place"
    with pytest.raises(FileExistsError):
        checkpoint_utils.PathManager.copy(str(source), str(target))


def test_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    order = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("sync"), sync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("rename"), replace(*names)))
    saving.save_whole({}, str(tmp_path / "checkpoint1.pt"))
    assert order == ["sync", "rename", "sync"]  # the file, its name, the directory


def test_only_errors_that_may_pass_are_tried_again(tmp_path: Path, monkeypatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(files.time, "sleep", pauses.append)

    def attempts(code: int) -> int:
        calls = []

        def fail(file) -> None:
            calls.append(1)
            raise OSError(code, os.strerror(code))

        with pytest.raises(UserError):
            files.write_whole(tmp_path / "x.pt", fail)
        return len(calls)

    assert attempts(errno.ENOSPC) == 1
    assert pauses == []
    assert attempts(errno.EIO) == 3


def test_saving_while_crashing_does_not_hide_the_crash(tmp_path: Path) -> None:
    """fairseq saves crash.pt while it handles an exception; a full disk must not take that exception's place."""
    with pytest.raises(KeyError, match="the real reason"):
        try:
            raise KeyError("the real reason")
        except KeyError:
            saving.save_whole({}, str(tmp_path / "missing" / "crash.pt"))
            raise


def test_other_errors_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        saving.save_whole({"no": lambda: None}, str(tmp_path / "x.pt"))
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    keep = ["checkpoint_last.pt", "notes.tmp", "checkpoint_plan.txt", "dict.txt", "checkpoint_old.pt.mine.tmp"]
    leftovers = ["checkpoint_last.pt.123.tmp", "checkpoint_1_7.pt.tmp", "checkpoint_2_8.pt.0a1b2c3d.45.tmp"]
    for name in keep + leftovers:
        (tmp_path / name).touch()
    assert [path.name for path in saving.remove_leftovers(tmp_path)] == sorted(leftovers)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(keep)


def test_what_a_process_is_writing_is_no_leftover(tmp_path: Path, monkeypatch) -> None:
    target, removed, replace = tmp_path / "checkpoint_averaged.pt", [], os.replace

    def write(file) -> None:
        file.write(b"whole")
        removed.extend(saving.remove_leftovers(tmp_path))

    def late(*names) -> None:
        removed.extend(saving.remove_leftovers(tmp_path))
        replace(*names)

    monkeypatch.setattr(files.os, "replace", late)
    files.write_whole(target, write)
    assert removed == [] and target.read_bytes() == b"whole"
    assert not files.is_held(target)
