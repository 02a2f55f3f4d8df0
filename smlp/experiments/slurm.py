"""Runs on a cluster: an array of jobs through ``scripts/slurm``, and a job that scores what they have trained.

The scripts check the options, restart pre-empted jobs and keep the runs apart (docs/slurm.md); this module adds only
what an experiment needs.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from smlp.errors import UserError, last_line
from smlp.experiments.folder import Folder
from smlp.experiments.json_files import read_json, write_json
from smlp.experiments.plan import PlannedRun, training_words
from smlp.experiments.spec import Experiment, Resources, option_words, path_word
from smlp.files import project_folder
from smlp.launch.local import signals_to, this_program

_SECONDS = 1800.0  # time to check all runs
_JOBS = Path("slurm", "jobs.json")  # in an experiment's folder
_JOB = r"\d{1,18}(?:;[^\s;-][^\s;]*)?"  # its number and, as sbatch prints with --clusters, the cluster that has it
_LOST = "sbatch took the job, but its number is not in:"  # as submit.sh says it


def submit(experiment: Experiment, folder: Folder, data: str, runs: Sequence[PlannedRun], then_score: bool) -> str:
    """Submit runs as one array of jobs; return what to tell the user.

    Args:
        experiment: what the file says.
        folder: of the experiment.
        data: argument DATA.
        runs: not yet trained; all of them in one folder.
        then_score: also submit the job that scores them.

    Raises:
        UserError: there is no Slurm, or it refuses.
    """
    names = folder.path / "slurm" / "runs.txt"
    names.parent.mkdir(parents=True, exist_ok=True)
    names.write_text("".join(sweep_line(experiment, run, data, folder) for run in runs), encoding="utf-8")
    for run in runs:
        write_command(experiment, run, data, folder)
    parent = folder.run(runs[0].folder).path.parent
    resources = experiment.resources
    options = {name: getattr(resources, name) for name in ("nodes", "gpus_per_node", "tasks_per_node")}
    # every model's options have been read already
    options |= {"sweep": names, "unchecked": True, "logs": folder.path / "slurm" / "logs"}
    array = [f"--array=1-{len(runs)}%{resources.jobs}"] if resources.jobs is not None else []
    command = ["bash", str(scripts_folder() / "submit.sh"), *option_words(options), *array, *_threads(resources)]
    command += [*resources.sbatch, "--", path_word(data), path_word(parent)]
    training = _submitted(folder, command, rf"^job ({_JOB}):")
    text = f"job {_named(training)}: {len(runs)} runs, {resources.ranks} ranks each"
    if then_score:
        try:
            scoring = submit_scores(experiment, folder, after=training)
        except UserError as error:
            raise UserError(
                f"job {_named(training)} trains the runs; the job that scores them is missing: {error}; run the same "
                "command when they are trained"
            ) from None
        text += f"; job {scoring} scores them afterwards"
    return f"{text}; logs in {folder.path / 'slurm' / 'logs'}"


def _threads(resources: Resources) -> list[str]:
    """Return the option of sbatch for the threads of a rank, which the jobs take from it."""
    return [] if resources.threads is None else [f"--cpus-per-task={resources.threads}"]


def sweep_line(experiment: Experiment, run: PlannedRun, data: str, folder: Folder) -> str:
    """Return a line of the list that ``submit.sh --sweep`` reads, without what the script adds itself."""
    words = training_words(experiment, run, data, folder.run(run.folder).path)
    save_dir = words.index("--save-dir")
    del words[save_dir : save_dir + 2]
    return f"{run.name} {shlex.join(word for word in words[1:] if word != '--cpu')}\n"


def write_command(experiment: Experiment, run: PlannedRun, data: str, folder: Folder) -> None:
    """Write down what the job of a run starts, so that it can be repeated without these scripts."""
    own = folder.run(run.folder)
    words = ["srun", f"--ntasks={experiment.resources.ranks}", *this_program(), "train"]
    own.write_command([*words, *training_words(experiment, run, data, own.path)], {})


def jobs_in_queue(folder: Folder) -> list[str]:
    """Return the jobs of this experiment that wait or run: numbers, with the name of a cluster that is another one.

    Raises:
        UserError: Slurm cannot be asked.
    """
    jobs = _jobs(folder.path / _JOBS)
    by_cluster: dict[str, dict[str, str]] = {}
    for job in jobs:
        number, cluster = _parts(job)
        by_cluster.setdefault(cluster, {})[number] = job
    queued = [own[number] for cluster, own in by_cluster.items() for number in _queued(list(own), cluster)]
    return [_named(job) for job in jobs if job in queued]


def _queued(numbers: list[str], cluster: str) -> list[str]:
    """Return those jobs of a cluster that wait or run; of the own one for an empty name."""
    cannot = f"cannot ask Slurm for the jobs {', '.join(numbers)}{f' of cluster {cluster}' if cluster else ''}"
    try:
        # %F is the number that all tasks of an array share
        command = ["squeue", *_on(cluster), "--noheader", "--format=%F", f"--jobs={','.join(numbers)}"]
        everything = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}  # filters
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=60, env=everything
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{cannot}: {error}") from None
    if done.returncode != 0 and "invalid job id" not in done.stderr.lower():  # Slurm forgets old jobs
        raise UserError(f"{cannot}: {done.stderr.strip()}")
    return [number for number in numbers if number in done.stdout.split()]


def _parts(job: str) -> tuple[str, str]:
    """Return number and cluster of a job; the cluster is empty if it is the own one."""
    number, _, cluster = job.partition(";")
    return number, cluster


def _named(job: str) -> str:
    """Return a job as messages name it."""
    number, cluster = _parts(job)
    return f"{number} of cluster {cluster}" if cluster else number


def _on(cluster: str) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


def scripts_folder() -> Path:
    """Return the folder of the scripts that submit jobs: ``scripts/slurm`` of ``SMLP_ROOT``, the clone or the wheel.

    Raises:
        UserError: ``SMLP_ROOT`` names a folder without these scripts.
    """
    root = Path(os.environ.get("SMLP_ROOT") or project_folder())
    folder = root / "scripts" / "slurm"
    if not (folder / "submit.sh").is_file():
        raise UserError(
            f"run.where: slurm needs scripts/slurm/submit.sh, which {root} does not have: 'smlp examples DIR' writes "
            "it; then set SMLP_ROOT=DIR"
        )
    return folder


def submit_scores(experiment: Experiment, folder: Folder, after: str | None = None) -> str:
    """Submit the job that scores what is trained, once another one has ended; return its number (and cluster).

    Raises:
        UserError: as :func:`submit`.
    """
    resources = experiment.resources
    output = folder.path / "slurm" / "logs" / "%j.out"
    options = [*_threads(resources), *resources.sbatch, f"--output={output}"]  # of one given twice, the last counts
    if after is not None:
        number, cluster = _parts(after)
        options += [f"--dependency=afterany:{number}", *_on(cluster)]
    options += [f"--gres={_gpu(resources.sbatch)}" if resources.gpus_per_node else "--gres=none"]
    scripts = scripts_folder()
    command = ["sbatch", "--parsable", *options, str(scripts / "score.sbatch")]
    command += [path_word(folder.yaml), path_word(folder.path)]
    environment = {"SMLP_ROOT": str(scripts.parents[1])}
    number = rf"^(?:Submitted batch job )?({_JOB})(?:;.*)?\s*$"
    return _named(_submitted(folder, command, number, environment))


def _gpu(sbatch: Sequence[str]) -> str:
    """Return one GPU as a generic resource, of the type that the jobs of the training ask for, if they name one."""
    types = [re.match(r"--gres=(?:.*,)?gpu:([^:,()]*[^\d:,()][^:,()]*)", option) for option in sbatch]
    return next((f"gpu:{found[1]}:1" for found in reversed(types) if found), "gpu:1")


def _jobs(path: Path) -> list[str]:
    """Return the jobs of an experiment that are noted in a file; none if it is not there."""
    jobs = read_json(path, [str]) if path.is_file() else []
    if not all(re.fullmatch(_JOB, job, re.ASCII) for job in jobs):
        raise UserError(f"{path} is damaged: it must be a list of numbers of jobs; remove it if none of them is left")
    return jobs


def _submitted(folder: Folder, command: list[str], pattern: str, environment: dict[str, str] | None = None) -> str:
    """Submit a job and note its number, which is returned; a signal waits until it is noted."""
    with _waiting_signals():
        path = folder.path / _JOBS
        jobs = _jobs(path)
        job = _job_of(_run(command, environment), pattern)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, [*jobs, job])
    return job


@contextmanager
def _waiting_signals() -> Iterator[None]:
    """Let a signal take effect after the block; a second one does at once.

    A job whose number is lost would train on, while the next command submits its runs again.
    """
    noted: list[signal.Signals] = []

    def note(number: signal.Signals) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)
        waits = "waiting for sbatch, to note its job; once more stops at once, and may lose it"
        print(f"{number.name}: {waits}", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():  # which gets all signals
        yield
        return
    try:
        with signals_to(note):
            yield
    finally:
        if noted:
            signal.raise_signal(noted[0])


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
            start_new_session=True,  # Ctrl-C reaches all processes of a terminal's job
            env={**os.environ, **(environment or {})},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"cannot submit: {error}") from None
    if done.returncode != 0:
        said = last_line(done.stderr or done.stdout).removeprefix("smlp: error: ")
        raise UserError(said if said.startswith(_LOST) else f"cannot submit: {said}")
    return done.stdout


def _job_of(output: str, pattern: str) -> str:
    found = re.findall(pattern, output.replace(" on cluster ", ";"), re.MULTILINE)  # without --parsable
    if not found:
        raise UserError(f"{_LOST} {output.strip()!r}")
    return found[-1]
