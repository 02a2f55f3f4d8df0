"""Runs on this machine: a number of them at a time, each trained by ``smlp train`` and then scored."""

from __future__ import annotations

import datetime
import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smlp.errors import UserError, last_line
from smlp.evaluation.zeroshot.readers import READERS
from smlp.experiments.folder import DONE, FAILED, RUNNING, STOPPED, WAITING, Folder, RunFolder
from smlp.experiments.json_files import SCORES, read_json
from smlp.experiments.plan import PlannedRun, checksum, launch_words, not_done, training_words
from smlp.experiments.processes import Chain, Ended, Step, run_chains
from smlp.experiments.progress import Progress, TrainingPlan, reached
from smlp.experiments.scores import updates_of
from smlp.experiments.spec import Experiment, option_words, zeroshot_words
from smlp.launch.local import this_module, this_program
from smlp.launch.machine import num_cores
from smlp.launch.stop_signals import EXIT_STOPPED

TRAIN, SCORE, ZEROSHOT = "train", "score", "zeroshot"


@dataclass(frozen=True)
class Machine:
    """The share of this machine that each run gets."""

    threads: int
    #: GPU numbers for each concurrent run; empty on CPUs
    gpus: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, experiment: Experiment, num_gpus: int) -> Machine:
        """Divide this machine among the concurrent runs of an experiment.

        Raises:
            UserError: there are too few GPUs.
        """
        resources = experiment.resources
        jobs = resources.at_a_time(1)
        if resources.device == "cpu" or (resources.device is None and num_gpus == 0):
            return cls.shared(jobs, resources.ranks, resources.threads)
        if num_gpus < resources.ranks * (jobs if resources.ranks > 1 else 1) or num_gpus == 0:
            raise UserError(
                f"{experiment.path}: run.jobs {jobs} at a time with run.ranks {resources.ranks} each need more than "
                f"the {num_gpus} GPUs that are visible here"
            )
        return cls.shared(jobs, resources.ranks, resources.threads, num_gpus)

    @classmethod
    def shared(cls, jobs: int, ranks: int = 1, threads: int | None = None, num_gpus: int = 0) -> Machine:
        """Divide cores and GPUs among concurrent runs; runs of one rank may share a GPU."""
        taken = [
            tuple((job * ranks + rank) % num_gpus for rank in range(ranks)) for job in range(jobs if num_gpus else 0)
        ]
        return cls(threads or max(1, num_cores() // (jobs * ranks)), tuple(taken))

    @property
    def runs_on_a_gpu(self) -> int:
        """Return the largest number of runs that share a GPU; 1 if each has its own, or none."""
        taken = Counter(gpu for gpus in self.gpus for gpu in gpus)
        return max(taken.values(), default=1)

    def environment(self, slot: int) -> dict[str, str]:
        """Return the environment variables of the run in a slot."""
        given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        numbers = self.gpus[slot] if self.gpus else ()
        visible = ",".join(given[number] if given else str(number) for number in numbers)
        return {"OMP_NUM_THREADS": str(self.threads), "CUDA_VISIBLE_DEVICES": visible}


class TrainingChain(Chain):
    """A training by ``smlp train``, with its record in ``run.json``; subclasses define its command and what follows it.

    Args:
        folder: of the run.
        run: what is planned.
        machine: the share of this machine that the run gets.
        progress: shows how far all runs are.
        labels: further entries of its record.
    """

    def __init__(
        self, folder: RunFolder, run: TrainingPlan, machine: Machine, progress: Progress, **labels: Any
    ) -> None:
        self.folder, self.plan, self.machine, self.progress, self.labels = folder, run, machine, progress, labels
        self._failed = False
        self._begun: set[str] = set()

    def next_step(self, slot: int) -> Step | None:
        """Return the first step whose result does not exist yet."""
        if self._failed or self.folder.state()["state"] == DONE:
            return None
        name = self.missing()
        if name is None:
            self.finish()
            return None
        if name in self._begun:  # it ended successfully, but its result does not exist
            self.fail(name, "produced no result, although it ended with status 0")
            return None
        self._begun.add(name)
        self.folder.update_state(**self.labels, state=RUNNING, message=None)
        step = Step(name, self.command(name), self.folder.output, self.machine.environment(slot))
        if name == TRAIN:
            self.folder.write_command(step.command, step.environment)
        return step

    def ended(self, result: Ended) -> None:
        """Record the attempt, and why it failed."""
        state = self.folder.state()
        start = datetime.datetime.fromtimestamp(result.start, datetime.UTC).isoformat(timespec="seconds")
        attempt = {"step": result.step.name, "start": start, "seconds": round(result.seconds, 1)}
        changes: dict[str, Any] = {"attempts": [*state["attempts"], {**attempt, "status": result.status}]}
        if result.step.name == TRAIN:
            changes["peak_memory_mib"] = max(result.peak_memory_mib, state.get("peak_memory_mib") or 0.0)
            changes["trained"] = result.status == 0 and reached(self.folder.log).updates >= self.plan.updates
        changes |= self.changes_after(result)
        if result.status == EXIT_STOPPED or result.is_stopping:  # start nothing more
            changes["state"] = STOPPED
        self.folder.update_state(**changes)
        if "state" not in changes and (result.status != 0 or changes.get("trained") is False):
            output = self.folder.output
            last = last_line(output.read_text(errors="replace")) if output.is_file() else f"{output} has been removed"
            if result.status == 0 and _updates_of_checkpoint(self.folder) >= self.plan.updates:
                last = (
                    f"{self.folder.log} lacks its end, which is lost if a machine stops at that moment: remove "
                    f"{self.folder.path} to train it again"
                )
            self.fail(result.step.name, f"failed with status {result.status}: {last}")

    def missing(self) -> str | None:
        """Return the name of the first step whose result does not exist yet; None if all do."""
        return None if is_trained(self.folder, self.plan.updates) else TRAIN

    def command(self, name: str) -> list[str]:
        """Return the command of a step."""
        raise NotImplementedError

    def changes_after(self, result: Ended) -> dict[str, Any]:
        """Return further entries of the record after a step."""
        return {}

    def finish(self) -> None:
        """Record that all steps are done, and remove checkpoints that are no longer needed."""
        self.folder.update_state(trained=True)  # first: nothing else says so once they are gone
        self.remove_checkpoints()
        self.folder.update_state(state=DONE, message=None)

    def remove_checkpoints(self) -> None:
        """Remove checkpoints that are no longer needed when the run is done."""

    def fail(self, name: str, what: str, state: str = FAILED) -> None:
        """Record why the run ends here."""
        self._failed = True
        message = f"{name} {what}"
        self.folder.update_state(state=state, message=message)
        self.progress.say(f"{self.plan.name}: {message} (see {self.folder.output})")

    def seconds(self) -> float:
        """Return how long all attempts took."""
        return sum(attempt["seconds"] for attempt in self.folder.state()["attempts"])


class RunChain(TrainingChain):
    """The steps of a run: training, and for a run of the comparison its scores."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Folder,
        data: str,
        run: PlannedRun,
        machine: Machine,
        progress: Progress,
        prefix: int,
    ) -> None:
        super().__init__(folder.run(run.folder), run, machine, progress, model=run.model.name, seed=run.seed)
        self.experiment, self.out, self.data, self.run, self.prefix = experiment, folder, data, run, prefix

    def changes_after(self, result: Ended) -> dict[str, Any]:
        is_answered = result.step.name == ZEROSHOT and result.status == 0
        return {"zeroshot_of": _zeroshot_of(self.experiment)} if is_answered else {}

    def fail(self, name: str, what: str, state: str = FAILED) -> None:
        """Record why the run ends here. A run that only lacks its answers to tasks counts as done."""
        super().fail(name, what, DONE if name == ZEROSHOT else state)
        if name == ZEROSHOT:
            self.folder.drop_checkpoints(keep_last=True)

    def missing(self) -> str | None:
        name = super().missing()
        if name is not None or self.run.tuning:
            return name
        return what_is_not_scored(self.experiment, self.folder, self.prefix)

    def command(self, name: str) -> list[str]:
        if name == TRAIN:
            words = training_words(self.experiment, self.run, self.data, self.folder.path)
            return [*this_program(), "train", *launch_words(self.experiment), *words]
        if name == SCORE:
            return [*this_module("smlp.experiments.scores"), str(self.out.path), self.run.folder]
        wanted = self.experiment.evaluation
        files = {"path": self.folder.last_checkpoint(), "data_dir": wanted.zeroshot_data, "json": self.folder.zeroshot}
        return [*this_program(), "zeroshot", *option_words(files), *zeroshot_words(wanted)]

    def remove_checkpoints(self) -> None:
        self.folder.drop_checkpoints(keep_last=not self.run.tuning)

    def finish(self) -> None:
        super().finish()
        found = reached(self.folder.log)
        valid = "" if found.valid is None else f", validation perplexity {found.valid:.2f} per token"
        self.progress.say(f"{self.run.name}: done in {self.seconds():.0f} s{valid}")


def is_trained(run: RunFolder, updates: int) -> bool:
    """Return whether a run has reached its budget.

    For a run of Slurm, which may go on with one that was stopped here, or one whose end nobody saw, the last checkpoint
    tells. The log would tell too early: fairseq writes the last validation down before it saves.
    """
    if run.state().get("trained"):
        return True
    # the log is cheaper to read than a checkpoint
    return reached(run.log).updates >= updates and _updates_of_checkpoint(run) >= updates


def _updates_of_checkpoint(run: RunFolder) -> int:
    try:
        return updates_of(run.last_checkpoint())
    except UserError:  # the training will report the problem
        return 0


def what_is_not_scored(experiment: Experiment, run: RunFolder, prefix: int) -> str | None:
    """Return the step that a trained run lacks; scores on other positions than those of all models do not count.

    Args:
        experiment: what the file says.
        run: trained.
        prefix: leading positions that some model of the experiment does not predict.
    """
    scores = read_json(run.scores, SCORES) if run.scores.is_file() else {"subsets": {}, "prefix": None}
    has_changed = scores.get("prefix") != prefix or scores.get("dtype", "fp32") != experiment.evaluation.dtype
    if has_changed or not set(experiment.evaluation.subsets) <= set(scores["subsets"]):
        return SCORE
    wanted = _zeroshot_of(experiment)
    if wanted is None or (run.zeroshot.is_file() and run.state().get("zeroshot_of") == wanted):
        return None
    return ZEROSHOT


def _zeroshot_of(experiment: Experiment) -> dict[str, Any] | None:
    """Return which tasks to answer, as ``run.json`` records it; None for no tasks."""
    wanted = experiment.evaluation
    if wanted.zeroshot_data is None:
        return None
    readers = [reader for name, reader in READERS.items() if {name, "all"} & set(wanted.zeroshot_tasks)]
    files = [path for reader in readers for path in reader.files(wanted.zeroshot_data)]
    return {
        "data": str(wanted.zeroshot_data),
        "tasks": list(wanted.zeroshot_tasks),
        "sha256": {str(path): checksum(path, path.stat().st_mtime_ns) for path in files},
        "options": option_words(wanted.zeroshot_options),
    }


def await_scores(experiment: Experiment, folder: Folder, runs: Sequence[PlannedRun], prefix: int) -> None:
    """Let done runs wait for scores that the experiment asks for now, and forget failures of tasks it no longer has."""
    for run in runs:
        own = folder.run(run.folder)
        state = own.state()
        if state["state"] != DONE or run.tuning:
            continue
        if what_is_not_scored(experiment, own, prefix):
            own.update_state(state=WAITING)
        elif state["message"]:
            own.update_state(message=None)


def run_here(
    experiment: Experiment,
    folder: Folder,
    data: str,
    runs: Sequence[PlannedRun],
    machine: Machine,
    progress: Progress,
    prefix: int,
) -> signal.Signals | None:
    """Do the runs that are not done yet; return the signal that stopped them, or None.

    Args:
        experiment: what the file says.
        folder: of the experiment.
        data: argument DATA.
        runs: to be done.
        machine: the share of this machine that each of them gets.
        progress: shows how far they are.
        prefix: leading positions that some model of the experiment does not predict, whether it is among these runs or
            not.
    """
    await_scores(experiment, folder, runs, prefix)
    left = not_done(folder, runs)
    chains = [RunChain(experiment, folder, data, run, machine, progress, prefix) for run in left]
    stopped = run_chains(chains, experiment.resources.at_a_time(len(left)), progress.watch)
    progress.end()
    return stopped


def time_here(
    experiment: Experiment, folder: Folder, runs: Sequence[PlannedRun], machine: Machine
) -> signal.Signals | None:
    """Time updates of the models in turn, if a model has no time yet; if this fails, only these times are missing.

    Returns:
        The signal that stopped it, or None.
    """
    rounds = experiment.evaluation.speed_rounds
    timed = read_json(folder.speed, {"models": dict})["models"] if folder.speed.is_file() else {}
    if not rounds:
        return None
    trained = [run for run in runs if folder.run(run.folder).state()["state"] == DONE]
    if all(run.model.name in timed for run in trained):
        return None
    print(f"time of an update, {rounds} rounds, models in turn", flush=True)
    log = folder.path / "logs" / "speed.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [*this_module("smlp.experiments.speed"), str(folder.path), str(rounds)]
    threads = machine.threads * experiment.resources.at_a_time(len(runs))  # nothing else runs now
    threads = max(machine.threads, min(threads, num_cores()))
    environment = {**machine.environment(0), "OMP_NUM_THREADS": str(threads)}
    return run_chains([_Timing(command, log, environment)], 1, lambda: None)


class _Timing(Chain):
    """A single command on which nothing else depends."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self._steps = [Step("speed", command, log, environment)]

    def next_step(self, slot: int) -> Step | None:
        return self._steps.pop() if self._steps else None

    def ended(self, result: Ended) -> None:
        if result.status != 0 and not result.is_stopping:
            print(f"smlp: warning: no speed.json: status {result.status}, see {result.step.output}", flush=True)
