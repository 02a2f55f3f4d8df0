"""The content of an experiment's file (:mod:`smlp.experiments.reading` reads it)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smlp.config.presets import PRESETS

#: the task of encoders
MASKED = "masked_lm"


@dataclass(frozen=True)
class ModelEntry:
    """A model as the file names it: an architecture with settings, and what is different about its training."""

    name: str
    arch: str
    overrides: dict[str, Any]
    recipe: dict[str, Any]

    @property
    def is_encoder(self) -> bool:
        """Return whether it is a masked language model."""
        direction = self.overrides.get("direction", PRESETS.get(self.arch, {}).get("direction"))
        return direction == "bidirectional"

    @property
    def folder(self) -> str:
        """The name as part of a path."""
        return _plain(self.name).strip("._-") or "model"


def grid_folder(model_folder: str, value: Any) -> str:
    """Return the folder of a run of the grid, relative to the experiment's."""
    return f"tune/{model_folder}-{_plain(str(value))}"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)


@dataclass(frozen=True)
class Matching:
    """Families for which to find settings that cost the same (``smlp match``)."""

    families: tuple[str, ...]
    like: str | None
    flops_per_token: float | None
    vary: str
    overrides: dict[str, Any]


@dataclass(frozen=True)
class TextSource:
    """Text to make data from."""

    source: str | None
    files: tuple[Path, ...]
    vocab_size: int


@dataclass(frozen=True)
class EvaluationPlan:
    """Measurements besides the training."""

    validations: int
    subsets: tuple[str, ...]
    targets: tuple[float, ...]
    zeroshot_data: Path | None
    zeroshot_tasks: tuple[str, ...]
    #: options of `smlp zeroshot`
    zeroshot_options: dict[str, Any]
    speed_rounds: int
    #: precision of the scores: a name of :data:`smlp.config.settings.DTYPES`
    dtype: str = "fp32"


@dataclass(frozen=True)
class Tuning:
    """A grid over one option before the comparison, the same for every model."""

    option: str
    values: tuple[Any, ...]
    updates: int
    seed: int


@dataclass(frozen=True)
class Resources:
    """The machine that the runs are trained on, and its resources."""

    where: str
    device: str | None
    #: concurrent runs; None on a cluster, which decides itself
    jobs: int | None
    threads: int | None
    ranks: int
    nodes: int
    gpus_per_node: int | None
    tasks_per_node: int | None
    sbatch: tuple[str, ...]
    tflops: float | None
    mfu: float | None

    @property
    def is_on_gpus(self) -> bool:
        """Return whether the file asks for GPUs."""
        return bool(self.gpus_per_node) or self.device == "gpu"

    def at_a_time(self, num_runs: int) -> int:
        """Return how many of ``num_runs`` runs run side by side."""
        return max(1, num_runs) if self.jobs is None else self.jobs


@dataclass(frozen=True)
class Experiment:
    """A comparison: which models, on which tokens, how they are trained, what is measured, and where."""

    path: Path
    title: str
    #: data folders joined by colons, or None
    data: str | None
    text: TextSource | None
    #: size of the dictionary, for a dry run without data
    vocab_size: int | None
    tokens_per_sample: int
    batch_size: int
    update_freq: int
    updates: int
    seeds: tuple[int, ...]
    log_interval: int
    max_spread: float
    recipe: dict[str, Any]
    models: tuple[ModelEntry, ...]
    matching: Matching | None
    evaluation: EvaluationPlan
    tuning: Tuning | None
    resources: Resources
    #: whether the section ``quick`` of the file counts
    is_quick: bool = False

    @property
    def name(self) -> str:
        """The name of the file without its ending; for the copy in a folder of runs, the folder's name."""
        return name_of(self.path)

    @property
    def task(self) -> str:
        """The task of fairseq that all models are trained on."""
        return MASKED if any(entry.is_encoder for entry in self.models) else "language_modeling"

    @property
    def tokens_per_update(self) -> int:
        """Tokens of an update over all ranks."""
        return self.tokens_per_sample * self.batch_size * self.update_freq * self.resources.ranks

    @property
    def tokens(self) -> int:
        """Tokens that each model is trained on."""
        return self.updates * self.tokens_per_update


def name_of(path: Path) -> str:
    """Return the name of an experiment: the file's, or, for the copy in a folder of runs, the folder's."""
    return path.resolve().parent.name if path.name == "experiment.yaml" else path.stem


def option_words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as options of a command line.

    True is a flag, a list is several words, and false or nothing leaves the option out.
    """
    words: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [_as_word(one) for one in value] if isinstance(value, list) else [_as_word(value)]
    return words


def _as_word(value: Any) -> str:
    return path_word(value) if isinstance(value, Path) else str(value)


def path_word(path: str | Path) -> str:
    """Return a path as a word of a command line, in which one that begins with a dash would be taken for an option."""
    return os.path.join(".", path) if str(path).startswith("-") else str(path)


def zeroshot_words(wanted: EvaluationPlan) -> list[str]:
    """Return the tasks and options of ``smlp zeroshot``."""
    return ["--tasks", ",".join(wanted.zeroshot_tasks), *option_words(wanted.zeroshot_options)]
