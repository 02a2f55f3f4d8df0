"""Running things in processes of their own, for the tests."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).resolve().parents[2]
HELPERS = REPOSITORY / "tests" / "helpers"
USER_DIR = str(REPOSITORY / "smlp")

# A model and a run small enough for a second. The model is one of fairseq's own.
TINY_LM = [
    *("--task", "language_modeling", "--arch", "transformer_lm", "--share-decoder-input-output-embed"),
    *("--decoder-embed-dim", "32", "--decoder-input-dim", "32", "--decoder-output-dim", "32"),
    *("--decoder-ffn-embed-dim", "64", "--decoder-layers", "1", "--decoder-attention-heads", "2"),
    *("--optimizer", "adam", "--lr", "1e-3", "--tokens-per-sample", "32", "--batch-size", "8"),
    *("--log-format", "simple", "--log-interval", "1", "--num-workers", "0", "--no-epoch-checkpoints"),
]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    rc: int
    stdout: str
    stderr: str
    #: of a run of several processes: exit code, seconds and standard error of each
    ranks: list = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        """How each process ended, with the last lines that it wrote to standard error."""
        ranks = self.ranks or [(self.rc, 0, self.stderr)]
        return "\n".join(
            f"--- rank {rank} ended with {code} after {seconds:.0f} s:\n" + "\n".join(text.splitlines()[-12:])
            for rank, (code, seconds, text) in enumerate(ranks)
        )

    @property
    def errors(self) -> list[str]:
        """The lines on standard error, without those that fairscale's import prints before any plug-in is loaded."""
        return [line for line in self.stderr.splitlines() if "fairscale" not in line and "torch.cuda.amp." not in line]


def _environment() -> dict[str, str]:
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    # One thread, and no GPU even where there is one: what is tested must not depend on the machine.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def as_user(packages: Path = REPOSITORY) -> dict[str, str]:
    """The environment of a user who has activated this Python's, with the packages of a clone or of a wheel."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}


def shell(
    command: str, cwd: Path, timeout: float = 200, packages: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Run a command as such a user types it."""
    environment = as_user(packages)
    return subprocess.run(
        ["bash", "-e", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )


def run_python(*arguments: str, timeout: float = 120, cwd: Path | None = None, stdin: str = "") -> Finished:
    """Run ``python ARGUMENTS`` in a process of its own, with this repository importable and one thread."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=_environment(),
        cwd=cwd,
        input=stdin,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def start_python(script: Path, stderr: IO[str]) -> subprocess.Popen[str]:
    """Start ``python SCRIPT`` in the same way, with pipes for its standard input and output."""
    command = [sys.executable, str(script)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
    return subprocess.Popen(command, text=True, env=_environment(), **pipes)
