"""Runs on a cluster: an array of jobs through ``scripts/slurm``, and a job that scores what they have trained.

The scripts check the options, restart pre-empted jobs and keep the runs apart (docs/slurm.md); this module adds only
what an experiment needs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from smlp.errors import UserError, last_line
from smlp.experiments.folder import Folder
from smlp.experiments.json_files import read_json, write_json
from smlp.experiments.plan import PlannedRun, training_words
from smlp.experiments.spec import Experiment, Resources, option_words
from smlp.files import project_folder
from smlp.launch.local import this_program

_SECONDS = 1800.0  # time to check all runs


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
    output = _run([*command, *resources.sbatch, "--", data, str(parent)])
    training = _job_of(output, r"^job (\d+)")
    _note_job(folder, training)
    text = f"job {training}: {len(runs)} runs, {resources.ranks} ranks each"
    if then_score:
        try:
            scoring = submit_scores(experiment, folder, f"afterany:{training}")
        except UserError as error:
            raise UserError(
                f"job {training} trains the runs; the job that scores them is missing: {error}; run the same command "
                "when they are trained"
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
    """Return the jobs of this experiment that wait or run.

    Raises:
        UserError: Slurm cannot be asked.
    """
    path = folder.path / "slurm" / "jobs.json"
    if not path.is_file():
        return []
    jobs = read_json(path, list)
    try:
        # %F is the number that all tasks of an array share
        command = ["squeue", "--noheader", "--format=%F", f"--jobs={','.join(jobs)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"cannot ask Slurm for the jobs {', '.join(jobs)}: {error}") from None
    if done.returncode != 0 and "invalid job id" not in done.stderr.lower():  # Slurm forgets old jobs
        raise UserError(f"cannot ask Slurm for the jobs {', '.join(jobs)}: {done.stderr.strip()}")
    return [job for job in jobs if job in done.stdout.split()]


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


def submit_scores(experiment: Experiment, folder: Folder, dependency: str | None = None) -> str:
    """Submit the job that scores what is trained; return its number.

    Raises:
        UserError: as :func:`submit`.
    """
    resources = experiment.resources
    output = folder.path / "slurm" / "logs" / "%j.out"
    options = [f"--dependency={dependency}"] if dependency else []
    options += [f"--output={output}", *_threads(resources), *resources.sbatch]
    options += ["--gres=gpu:1"] if resources.gpus_per_node else ["--gres=none"]
    scripts = scripts_folder()
    command = ["sbatch", "--parsable", *options, str(scripts / "score.sbatch")]
    environment = {"SMLP_ROOT": str(scripts.parents[1])}
    job = _job_of(_run([*command, str(folder.yaml), str(folder.path)], environment), r"^(\d+)")
    _note_job(folder, job)
    return job


def _note_job(folder: Folder, job: str) -> None:
    """Add a job to those of the experiment."""
    path = folder.path / "slurm" / "jobs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, [*(read_json(path, list) if path.is_file() else []), job])


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
            env={**os.environ, **(environment or {})},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"cannot submit: {error}") from None
    if done.returncode != 0:
        raise UserError(f"cannot submit: {last_line(done.stderr or done.stdout).removeprefix('smlp: error: ')}")
    return done.stdout


def _job_of(output: str, pattern: str) -> str:
    found = re.search(pattern, output, re.MULTILINE)
    if found is None:
        raise UserError(f"Slurm took the job, but its number is not in: {output.strip()!r}")
    return found[1]
