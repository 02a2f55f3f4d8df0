"""Jobs on the cluster of :mod:`slurm_cluster`, submitted as a user would, and what became of them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from running import REPOSITORY, Finished
from slurm_cluster import Cluster

SUBMIT = REPOSITORY / "scripts" / "slurm" / "submit.sh"
TRAIN = SUBMIT.with_name("train.sbatch")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


@dataclasses.dataclass(frozen=True)
class Job:
    """What Slurm says of a job."""

    state: str
    exit_status: int
    restarts: int
    nodes: str


class Jobs:
    """Of one cluster, from one folder."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def run(self, *words: object, timeout: float = 200) -> Finished:
        """Runs a command in the folder."""
        done = subprocess.run(
            list(map(str, words)),
            cwd=self.folder,
            env=self.cluster.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    def submit(self, size: Sequence[object], *words: object) -> str:
        """``submit.sh SIZE -- WORDS``; returns the job's number."""
        done = self.run("bash", SUBMIT, *size, "--", *words)
        assert done.rc == 0, done.stderr
        return re.match(r"job (\d+):", done.stdout)[1]

    def sbatch(self, size: Sequence[object], *words: object) -> str:
        """The same without ``submit.sh``, which takes some seconds to check the options: by hand, on CPUs."""
        done = self.run("sbatch", "--parsable", "--gres=none", "--cpus-per-task=1", *size, TRAIN, *words)
        assert done.rc == 0, done.stderr
        return done.stdout.strip()

    def look(self, number: str) -> Job:
        text = self.cluster.command("scontrol", "show", "job", "-o", number)
        fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
        return Job(
            fields["JobState"], int(fields["ExitCode"].partition(":")[0]), int(fields["Restarts"]), fields["NodeList"]
        )

    def wait_until(self, number: str, condition: Callable[[], bool], timeout: float = 200) -> None:
        """Until ``condition()``; fails with what the job printed if that takes too long or the job ends before."""
        limit = time.monotonic() + timeout
        while not condition():
            over = time.monotonic() > limit or self.look(number).state in ENDED
            assert not over or condition(), f"job {number}, {self.look(number)}:\n{self.output(number)}"
            time.sleep(0.2)

    def end_of(self, number: str, timeout: float = 200) -> Job:
        self.wait_until(number, lambda: self.look(number).state in ENDED, timeout)
        return self.look(number)

    def trained(self, number: str) -> Job:
        """Waits until a job has trained to its end."""
        job = self.end_of(number)
        assert (job.state, job.exit_status) == ("COMPLETED", 0), self.output(number)
        return job

    def log(self, number: str, rank: int | None = None) -> str:
        """Of the job, or of one of its ranks; empty if there is none yet."""
        logs = self.folder / "slurm-logs"
        # where submit.sh puts them, and where sbatch does
        of_job = [logs / f"{number}.out", self.folder / f"slurm-{number}.out"]
        paths = of_job if rank is None else [logs / number / f"rank-{rank}.log"]
        return "".join(path.read_text() for path in paths if path.exists())

    def output(self, number: str) -> str:
        """The end of all logs."""
        files = sorted((self.folder / "slurm-logs" / number).glob("*.log"))
        return "\n".join([self.log(number), *(f"{path.name}:\n{path.read_text()[-1500:]}" for path in files)])


def programs_first(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """Without variables of a Slurm around, and with the programs of ``folder`` before others."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    return {**kept, "PATH": f"{folder}:{environment['PATH']}", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
