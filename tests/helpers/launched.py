"""Starting ``smlp`` and its launcher in processes that get signals, and plug-ins that disturb a run from inside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from running import REPOSITORY, Finished


def start(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    """``python ARGUMENTS`` with this repository importable, one thread, no GPU, and the given variables as well; in a
    process group of its own, as a shell would start it."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **own, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> Finished:
    """Waits for its end; kills it if that does not come in time."""
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return Finished(process.returncode, out, err)


def wait_for(path: Path, timeout: float = 60) -> str:
    """Waits until a file has something in it; returns that."""
    limit = time.monotonic() + timeout
    while not path.exists() or not path.read_text():
        assert time.monotonic() < limit, f"no {path} within {timeout} s"
        time.sleep(0.02)
    return path.read_text()


def is_running(pid: int) -> bool:
    """Whether a process exists that is not only waiting for its parent to notice its end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


_PLUGIN = '''
import functools, os, signal, sys
import smlp.models
from fairseq import checkpoint_utils
from fairseq.trainer import Trainer

RANK = int(os.environ.get("RANK", 0))


def before(owner, name, when, action):
    """Does something before a function is called, if it is so at that moment."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(self, *args, **kw):
        if when(self):
            action()
        return original(self, *args, **kw)

    setattr(owner, name, wrapper)

'''


def make_plugin(folder: Path, body: str) -> Path:
    """A directory for ``--user-dir`` that loads this package's plug-in and runs ``body`` after it."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(_PLUGIN + body)
    return folder
