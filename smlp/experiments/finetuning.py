"""``smlp finetune``: an encoder, fine-tuned at every point of a grid with several seeds; every run is ``smlp train``.

The defaults are those of Liu et al., 2021, Table 9. A point is chosen by its median over seeds
(:mod:`smlp.experiments.medians`).
"""

from __future__ import annotations

import hashlib
import math
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from data_prep.finetuning.glue_tasks import TASKS
from data_prep.flow.streams import sha256_of
from smlp.checkpoint.opened import open_checkpoint
from smlp.config import ModelConfig, differences, flatten
from smlp.config.presets import FROM_TASK, preset
from smlp.errors import UserError
from smlp.evaluation.curves import log_records
from smlp.experiments.folder import DONE, Folder, RunFolder, check_made_with
from smlp.experiments.json_files import COUNT, Each, Finite, Maybe, read_json
from smlp.experiments.local import TRAIN, Machine, TrainingChain
from smlp.experiments.plan import VALID_BATCHES
from smlp.experiments.processes import run_chains
from smlp.experiments.progress import Progress
from smlp.experiments.spec import option_words, path_word
from smlp.fairseq_compat.loading import check_dictionary_of, exported
from smlp.files import check_no_other, number_of
from smlp.launch.local import this_program
from smlp.text.tokenizer import Vocabulary
from smlp.text.tokenizer_files import DICTIONARY

#: the log's names for each metric by which a model can be chosen; fairseq rounds all but those of SQuAD to 0.1
METRICS = {
    **{"accuracy": ("accuracy",), "mcc": ("mcc",), "acc_and_f1": ("accuracy", "f1", "acc_and_f1")},
    **{"pearson_and_spearman": ("pearson", "spearman", "pearson_and_spearman"), "f1": ("em", "f1")},
}
GLUE_METRICS = tuple(name for name in METRICS if name != "f1")
SQUAD, SQUAD_2 = "SQuAD v1.1", "SQuAD v2.0"
_MANIFEST = {
    **{"step": str, "settings": {"task": Maybe(str), "tokenizer": {"sha256": Each(str)}}, "splits": Each(dict)},
    "classes": Maybe([str]),
}
_SPLIT = {
    "glue": {"rows": COUNT},
    "squad": {"questions": COUNT, "unanswerable": int},
}
#: dropout is chosen here, whatever the encoder was trained with
_NOT_OF_ENCODER = (*FROM_TASK, "dropout", "attention_dropout")
_LOG_INTERVAL = 50


#: what the folder of the runs gets
RESULTS, PAGE = "results.json", "results.md"


@dataclass(frozen=True)
class TaskData:
    """A folder of ``smlp data glue`` or ``smlp data squad``."""

    path: Path
    #: a task of GLUE, :data:`SQUAD` or :data:`SQUAD_2`; None for your own files
    task: str | None
    metric: str
    #: splits with labels, to validate on; the first one chooses
    subsets: tuple[str, ...]
    #: rows of each split
    rows: Mapping[str, int]
    #: 0 for a number to predict, None for SQuAD
    num_classes: int | None
    sha256: str

    @property
    def is_squad(self) -> bool:
        """Return whether answers are spans of text."""
        return self.num_classes is None

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of fairseq-train that belong to the task."""
        if self.is_squad:
            return {"task": "squad", "criterion": "span", "doc_stride": 128}
        options = {"task": "sentence_prediction", "criterion": "sentence_prediction", "init_token": 0}
        options |= {"num_classes": self.num_classes or 1, "regression_target": not self.num_classes}
        return {**options, "shorten_method": "truncate", f"report_{self.metric}": self.metric != "accuracy"}


@dataclass(frozen=True)
class PretrainedEncoder:
    """A trained encoder."""

    path: Path
    arch: str
    #: settings that differ from those of the architecture
    overrides: dict[str, Any]
    config: ModelConfig
    num_updates: int
    sha256: str

    @property
    def has_attention(self) -> bool:
        """Return whether the model has attention, on which dropout can act."""
        own = flatten(self.config)
        return bool(own.get("gmlp_attention_dim")) or self.config.dense_block == "transformer"


@dataclass(frozen=True)
class FinetuningRun:
    """One training: a point of the grid with a seed."""

    lr: float
    batch_size: int
    seed: int
    updates: int

    @property
    def name(self) -> str:
        """Return the name of the run in messages."""
        return f"lr{self.lr}-b{self.batch_size}-s{self.seed}"

    @property
    def folder(self) -> str:
        """Return the folder of the run, relative to that of all runs."""
        return f"runs/{self.name}"


@dataclass(frozen=True)
class Finetuning:
    """A request to fine-tune a checkpoint on data; either ``epochs`` or ``updates`` is given."""

    encoder: PretrainedEncoder
    data: TaskData
    lrs: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    epochs: int | None
    updates: int | None
    #: share of the updates
    warmup: float
    #: further options of fairseq-train that all runs have
    recipe: dict[str, Any]
    #: the same, as words of a command line
    train_options: tuple[str, ...] = ()
    is_on_cpu: bool = False
    keeps_checkpoints: bool = False

    @property
    def grid(self) -> list[tuple[float, int]]:
        """Return learning rates with batch sizes."""
        return [(lr, batch_size) for batch_size in self.batch_sizes for lr in self.lrs]

    def updates_of(self, batch_size: int) -> int:
        """Return the updates of a run."""
        return self.updates or math.ceil(self.data.rows["train"] / batch_size) * (self.epochs or 1)

    def runs(self) -> list[FinetuningRun]:
        """Return all runs, seed by seed, so that the first of them compare all points."""
        return [FinetuningRun(lr, size, seed, self.updates_of(size)) for seed in self.seeds for lr, size in self.grid]

    def options(self, run: FinetuningRun) -> dict[str, Any]:
        """Return the options of a run that its weights depend on."""
        optimizer = {"optimizer": "adam", "adam_betas": "(0.9,0.999)", "adam_eps": 1e-6, "lr": run.lr}
        schedule = {"lr_scheduler": "polynomial_decay", "warmup_updates": round(self.warmup * run.updates)}
        length = {"max_update": run.updates, "total_num_update": run.updates}
        batches = {"batch_size": run.batch_size, "required_batch_size_multiple": 1, "seed": run.seed}
        return {**self.data.options, **self.recipe, **optimizer, **schedule, **length, **batches}

    def made_with(self, run: FinetuningRun) -> dict[str, Any]:
        """Return what the weights of a run depend on."""
        own = {"encoder_sha256": self.encoder.sha256, "data_sha256": self.data.sha256}
        return {**own, **self.options(run), "train_options": list(self.train_options)}

    def words(self, run: FinetuningRun, save_dir: Path) -> list[str]:
        """Return the arguments of ``smlp train`` for a run.

        --finetune-from-model, unlike --restore-file, lets it resume.
        """
        around = {
            "valid_subset": ",".join(self.data.subsets),
            "batch_size_valid": VALID_BATCHES * run.batch_size,
            "no_epoch_checkpoints": True,
            "best_checkpoint_metric": self.data.metric,
            "maximize_best_checkpoint_metric": True,
            "predictions_file": save_dir / "answers-{subset}.json" if self.data.is_squad else None,
            "log_format": "json",
            "log_interval": min(_LOG_INTERVAL, run.updates),
            "log_file": save_dir / "train.log",
            "environment_file": save_dir / "environment.jsonl",
            "save_dir": save_dir,
            "cpu": self.is_on_cpu,
        }
        model = {"arch": self.encoder.arch, **self.encoder.overrides, "finetune_from_model": self.encoder.path}
        return [path_word(self.data.path), *option_words({**model, **self.options(run), **around}), *self.train_options]


def read_data(path: Path, metric: str | None = None) -> TaskData:
    """Read what a folder says about itself.

    Args:
        path: of the folder.
        metric: one of :data:`GLUE_METRICS`; that of the task by default.

    Raises:
        UserError: it is not a folder of ``smlp data glue`` or ``squad``, has nothing to validate on, or the metric does
            not fit.
    """
    file = path / "manifest.json"
    if not file.is_file():
        raise UserError(f"there is no file {file}: make the data with 'smlp data glue' or 'smlp data squad'")
    manifest = read_json(file, _MANIFEST)
    step, splits = manifest["step"], manifest["splits"]
    if step not in _SPLIT:
        raise UserError(
            f"{path} was made by 'smlp data {step}': fine-tuning needs a folder of 'smlp data glue' or squad"
        )
    read_json(file, {"splits": Each(_SPLIT[step])})
    is_squad = step == "squad"
    subsets = tuple(name for name in splits if name.startswith("valid"))
    if "train" not in splits or not subsets:
        raise UserError(f"{path} has no {'train' if 'train' not in splits else 'valid'} split")
    rows = {name: facts["questions" if is_squad else "rows"] for name, facts in splits.items()}
    digest = sha256_of(file)
    if is_squad:
        if metric is not None:
            raise UserError(f"--metric {metric}: SQuAD has exact match and F1")
        task = SQUAD_2 if any(splits[name]["unanswerable"] for name in subsets) else SQUAD
        return TaskData(path, task, "f1", subsets, rows, None, digest)
    task, classes = manifest["settings"]["task"], manifest["classes"] or []
    if metric is None and task not in TASKS:
        what = "names no GLUE task" if task is None else f"names the unknown task {task!r}"
        raise UserError(f"{path} {what}: give --metric, one of {', '.join(GLUE_METRICS)}")
    metric = metric or TASKS[task].metric
    if (metric == "pearson_and_spearman") == bool(classes):
        raise UserError(
            f"--metric {metric}: {path} has {f'{len(classes)} classes' if classes else 'numbers to predict'}"
        )
    if metric in ("mcc", "acc_and_f1") and set(classes) != {"0", "1"}:
        raise UserError(f"--metric {metric} needs the labels 0 and 1, but {path} has {', '.join(classes):.80}")
    return TaskData(path, task, metric, subsets, rows, len(classes), digest)


def read_encoder(path: Path, data: TaskData, allows_other_dictionary: bool = False) -> PretrainedEncoder:
    """Read what a checkpoint says about itself, and compare its dictionary and tokenizer with those of the data.

    Raises:
        UserError: it is missing, damaged, an export or of another kind of model, or the data were made with another
            dictionary or tokenizer.
    """
    checkpoint = open_checkpoint(path)
    if checkpoint.is_export:
        raise UserError(exported(str(path)))
    config, arch = checkpoint.config, checkpoint.arch
    if not config.is_bidirectional:
        raise UserError(f"{path} is a language model ({arch}): fine-tuning needs an encoder, such as gmlp_mlm")
    symbols = len(Vocabulary.load(data.path / ("" if data.is_squad else "input0") / DICTIONARY).with_mask())
    if symbols != config.vocab_size:
        raise UserError(
            f"{path} has a vocabulary of {config.vocab_size} symbols, {data.path} one of {symbols}: make the data with "
            "the tokenizer that the checkpoint was trained with"
        )
    check_dictionary_of(str(path), data.path, SimpleNamespace(other_dictionary=allows_other_dictionary))
    made_with = read_json(data.path / "manifest.json", _MANIFEST)["settings"]["tokenizer"]["sha256"]
    for name, digest in made_with.items():
        beside = path.parent / Path(name).name
        if name != DICTIONARY and beside.is_file() and sha256_of(beside) != digest:
            raise UserError(f"{data.path} was made with another {name} than the checkpoint's {beside}")
    changed = differences(config, preset(arch))
    overrides = {name: value for name, value in changed.items() if name not in _NOT_OF_ENCODER}
    digests = b"".join(bytes.fromhex(sha256_of(file)) for file in checkpoint.paths)
    sha256 = hashlib.sha256(digests).hexdigest()
    return PretrainedEncoder(path, arch, overrides, config, checkpoint.num_updates, sha256)


def scores_of(run: RunFolder, data: TaskData, updates: int) -> dict[str, dict[str, float]] | None:
    """Return the metrics of a run's validation after its last update, by split; None if one is missing or no number."""
    found: dict[str, dict[str, float]] = {}
    for record in log_records(run.log) if run.log.is_file() else ():
        for subset in data.subsets:
            if record.get(f"{subset}_num_updates") == str(updates):
                values = {name: record.get(f"{subset}_{name}", "nan") for name in METRICS[data.metric]}
                found[subset] = {name: number_of(str(value)) for name, value in values.items()}
    numbers = [number for own in found.values() for number in own.values()]
    return found if len(found) == len(data.subsets) and all(map(math.isfinite, numbers)) else None


class _FinetuningChain(TrainingChain):
    """The training of a run."""

    def __init__(self, plan: Finetuning, folder: Folder, run: FinetuningRun, machine: Machine, progress: Progress):
        super().__init__(folder.run(run.folder), run, machine, progress, seed=run.seed)
        self.finetuning, self.run = plan, run

    def command(self, name: str) -> list[str]:
        return [*this_program(), "train", *self.finetuning.words(self.run, self.folder.path)]

    def missing(self) -> str | None:
        name = super().missing()
        if name is None and not self._begun and self._scores() is None:  # as the call before this one reported
            self.folder.drop_checkpoints(keep_last=False)
            self.folder.update_state(trained=False)
            return TRAIN
        return name

    def remove_checkpoints(self) -> None:
        if not self.finetuning.keeps_checkpoints:
            self.folder.drop_checkpoints(keep_last=False)

    def finish(self) -> None:
        data, scores = self.finetuning.data, self._scores()
        if scores is None:
            self.fail(TRAIN, f"ended without a finite {data.metric} on {', '.join(data.subsets)}")
            return
        super().finish()
        said = ", ".join(f"{subset} {data.metric} {scores[subset][data.metric]:g}" for subset in data.subsets)
        self.progress.say(f"{self.run.name}: done in {self.seconds():.0f} s, {said}")

    def _scores(self) -> dict[str, dict[str, float]] | None:
        return scores_of(self.folder, self.finetuning.data, self.run.updates)


def check_folder_of(plan: Finetuning, folder: Folder) -> None:
    """Refuse a folder with results or runs that were made with something else.

    Raises:
        UserError: the message names what differs.
    """
    for run in plan.runs():
        folder.run(run.folder).check(plan.made_with(run))
    if not (folder.path / RESULTS).is_file():
        return check_no_other(folder.path, (RESULTS, PAGE))
    shape = {"made_with": {"lr": Finite(above=0), "batch_size": COUNT, "seed": Finite(least=0, kind=int)}}
    made_with = read_json(folder.path / RESULTS, shape)["made_with"]
    size = made_with["batch_size"]
    run = FinetuningRun(made_with["lr"], size, made_with["seed"], plan.updates_of(size))
    check_made_with(folder.path, made_with, plan.made_with(run))


def run_finetuning(
    plan: Finetuning, folder: Folder, jobs: int, threads: int | None
) -> tuple[signal.Signals | None, list[str]]:
    """Do the runs that are not done yet.

    Args:
        plan: what to run.
        folder: of the runs, locked.
        jobs: runs at a time.
        threads: of each run.

    Returns:
        The signal that stopped them, or None; and why runs are not done, a sentence each.

    Raises:
        UserError: the folder has results that were made with something else.
    """
    runs = plan.runs()
    check_folder_of(plan, folder)
    for run in runs:
        folder.run(run.folder).claim(plan.made_with(run))
    left = [run for run in runs if folder.run(run.folder).state()["state"] != DONE]
    machine = Machine.shared(jobs, 1, threads, 0 if plan.is_on_cpu else torch.cuda.device_count())
    print(f"{len(left)} of {len(runs)} runs to do, {jobs} at a time, {machine.threads} threads each", flush=True)
    progress = Progress(folder, runs)
    chains = [_FinetuningChain(plan, folder, run, machine, progress) for run in left]
    stopped = run_chains(chains, jobs, progress.watch)
    progress.end()
    reasons = {run.name: _why_not_done(plan, folder.run(run.folder), run) for run in runs}
    return stopped, [f"{name}: {why}" for name, why in reasons.items() if why is not None]


def _why_not_done(plan: Finetuning, folder: RunFolder, run: FinetuningRun) -> str | None:
    """Return why a run has no scores; None if it has."""
    state = folder.state()
    if state["state"] != DONE:
        return state["message"] or "it was stopped, and can be resumed"
    if scores_of(folder, plan.data, run.updates) is None:
        return f"{folder.log} has lost the scores of its last update: remove {folder.path} to train it again"
    return None


def print_plan(plan: Finetuning, folder: Folder) -> None:
    """Print the runs and the command of the first one.

    Raises:
        UserError: the folder has results that were made with something else.
    """
    check_folder_of(plan, folder)
    data, runs = plan.data, plan.runs()
    lengths = ", ".join(f"{plan.updates_of(size):,} at batch size {size}" for size in plan.batch_sizes)
    print(f"{plan.encoder.arch} ({plan.encoder.path}, update {plan.encoder.num_updates:,})")
    print(f"{data.task or data.path}: {data.rows['train']:,} rows, {data.metric} on {', '.join(data.subsets)}")
    print(f"{len(plan.grid)} points x {len(plan.seeds)} seeds = {len(runs)} runs; updates: {lengths}")
    for run in runs:
        print(f"  {run.name}: {folder.run(run.folder).state()['state']}")
    print(f"the first run:\n  smlp train {shlex.join(plan.words(runs[0], folder.run(runs[0].folder).path))}")
