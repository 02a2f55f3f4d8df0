"""Plan an experiment: its models with their costs, and the command of every run."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.flow.streams import sha256_of
from smlp.config import ModelConfig, flatten
from smlp.config.ignored_settings import ignored_settings
from smlp.config.presets import FROM_TASK, PRESETS, preset
from smlp.costs.formula import flops_per_token, parameters
from smlp.costs.match import FAMILIES, like, match
from smlp.errors import UserError
from smlp.experiments.folder import DONE, SETTINGS, Folder
from smlp.experiments.reading import check_names
from smlp.experiments.spec import MASKED, Experiment, ModelEntry, grid_folder, option_words, path_word

#: batch size in validation relative to training
VALID_BATCHES = 4
#: number of epochs after which fairseq would validate and save on its own
_NEVER = "1000000000"

#: function that builds a model's configuration from options of fairseq-train, and the settings that they come from
Configure = Callable[[list[str], dict[str, Any]], ModelConfig]


@dataclass(frozen=True)
class PlannedModel:
    """A model of the comparison."""

    name: str
    folder: str
    #: one of :data:`smlp.costs.match.FAMILIES`, or None
    family: str | None
    arch: str
    overrides: dict[str, Any]
    #: its own training options, which override the shared ones
    recipe: dict[str, Any]
    config: ModelConfig
    #: nominal multiply-adds of the forward pass
    flops_per_token: float

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Return the settings on which its weights depend, besides the data and the length of texts."""
        settings = flatten(self.config)
        ignored = ignored_settings(self.config, dict.fromkeys(settings))  # whatever they are
        without_effect = {*FROM_TASK, "checkpoint_activations", *ignored}
        return {name: value for name, value in settings.items() if name not in without_effect}

    def as_json(self, experiment: Experiment) -> dict[str, Any]:
        """Return its record in ``experiment.json``."""
        recipe = {**experiment.recipe, **self.recipe}
        if experiment.tuning:  # ``tuned.json`` has the value
            recipe.pop(experiment.tuning.option, None)
        return {
            "name": self.name,
            "folder": self.folder,
            "family": self.family,
            "arch": self.arch,
            "overrides": self.overrides,
            "recipe": option_words(recipe),
            "config": flatten(self.config),
            "flops_per_token": self.flops_per_token,
            "parameters": asdict(parameters(self.config, fitting_ranks(self.config, experiment.resources.ranks))),
        }


@dataclass(frozen=True)
class PlannedRun:
    """One training: a model with a seed, and the value of a tuned option."""

    model: PlannedModel
    seed: int
    updates: int
    #: the folder of the run, relative to the experiment's
    folder: str
    recipe: dict[str, Any]
    tuning: bool = False

    def made_with(self, experiment: Experiment) -> dict[str, Any]:
        """Return what its weights depend on, besides what all runs of the experiment share."""
        recipe = {**experiment.recipe, **self.model.recipe, **self.recipe}
        first = Path(str(recipe.get("finetune_from_model", "")))
        if os.path.isfile(first):  # which is false of a name that cannot be, too
            recipe["finetune_from_model_sha256"] = checksum(first, first.stat().st_mtime_ns)
        own = {"arch": self.model.arch, "seed": self.seed, "updates": self.updates, **self.model.overrides, **recipe}
        return {**own, SETTINGS: self.model.settings}

    @property
    def name(self) -> str:
        """Return the name of the run in messages."""
        return Path(self.folder).name


@functools.cache
def checksum(path: Path, mtime_ns: int) -> str:
    """Return the checksum of a file; it is read once for all runs, as long as it does not change."""
    return sha256_of(path)


def entries_of(experiment: Experiment, vocab_size: int) -> list[ModelEntry]:
    """Return the models that the file names, and those that ``match`` finds for it.

    Raises:
        UserError: a family cannot be matched, or two models share a name.
    """
    entries = list(experiment.models)
    wanted = experiment.matching
    if wanted is not None:
        shared = {**wanted.overrides, "vocab_size": vocab_size, "max_tokens": experiment.tokens_per_sample}
        target, size = wanted.flops_per_token, ""
        if wanted.like is not None:
            if "num_experts" in shared:
                raise UserError(
                    f"{experiment.path}: match.num_experts and match.like exclude each other: the cost of "
                    f"{wanted.like} is that of its own experts"
                )
            target, size, own = _of_match(experiment, like, wanted.like, shared)
            shared = {**shared, **own}
        for family in wanted.families:
            found = _of_match(experiment, match, family, target, wanted.vary, size, shared)
            if not found.matches:
                raise UserError(
                    f"{experiment.path}: no settings of {family} cost {target:.5g} multiply-adds per token; the "
                    f"nearest cost {found.flops_per_token:.5g}, {found.difference:+.2%}; the vocabulary alone, "
                    f"V={vocab_size} times H={found.config.embed_dim}, costs {vocab_size * found.config.embed_dim:.5g}"
                )
            own, base = flatten(found.config), flatten(preset(found.arch))
            overrides = {name: value for name, value in own.items() if value != base[name] and name not in _FROM_DATA}
            entries.append(ModelEntry(family, found.arch, overrides, {}))
    check_names(experiment.path, entries)
    return entries


def _of_match(experiment: Experiment, function: Callable[..., Any], *given: Any) -> Any:
    try:
        return function(*given)
    except UserError as error:
        raise UserError(f"{experiment.path}: match: {error}") from None


#: settings determined by data and task
_FROM_DATA = (*FROM_TASK, "dropout")


def plan_models(experiment: Experiment, vocab_size: int, configure: Configure) -> list[PlannedModel]:
    """Return the models with their configurations and costs, which must agree.

    Args:
        experiment: what the file says.
        vocab_size: V, of the data.
        configure: builds the configuration for a command line of fairseq-train.

    Raises:
        UserError: an option is wrong, or the costs differ by more than ``max_spread``.
    """
    models: list[PlannedModel] = []
    tuning = experiment.tuning
    for entry in entries_of(experiment, vocab_size):
        recipe = {**experiment.recipe, **entry.recipe}
        words = [*_model_words(entry), *shape_words(experiment), *option_words(recipe)]
        taken_back = {name for name, value in entry.recipe.items() if value is None} & experiment.recipe.keys()
        given = {name: value for name, value in {**entry.overrides, **recipe}.items() if name not in taken_back}
        try:
            config = configure(words, given)
            settings = flatten(config)
            for name, value in given.items():
                if value is False and settings.get(name):
                    raise UserError(f"{name}: false leaves the option out, and {entry.arch} has {settings[name]}")
            for value in tuning.values if tuning and not models else ():  # check once, for the first model
                tried = {tuning.option: value}
                if configure([*words, *option_words(tried)], tried) != config:
                    raise UserError(f"tune.{tuning.option} is a setting of the model, not of its training")
        except UserError as error:
            raise UserError(f"{experiment.path}: model {entry.name}: {error}") from None
        own = (entry.name, entry.folder, family_of(entry.arch), entry.arch, entry.overrides, entry.recipe)
        models.append(PlannedModel(*own, config, flops_per_token(config)))
    check_spread(experiment, models)
    folders = Counter(run.folder for run in tuning_runs(experiment, models))
    if shared := [folder for folder, count in folders.items() if count > 1]:
        raise UserError(f"{experiment.path}: two runs of the grid would share the folder {shared[0]}: rename a model")
    return models


def planned_models(experiment: Experiment, data: str, vocab_size: int) -> list[PlannedModel]:
    """Return the models, each with the configuration that fairseq builds from its options.

    Args:
        experiment: what the file says.
        data: argument DATA.
        vocab_size: of its dictionary.

    Raises:
        UserError: an option is wrong, or FLOPs differ too much.
    """
    from smlp.config.presets import config_of
    from smlp.fairseq_compat.arguments import default_arguments
    from smlp.fairseq_compat.command_line import training_configuration
    from smlp.fairseq_compat.settings import check_pairs, settle_context

    def configure(words: list[str], settings: dict[str, Any]) -> Any:
        budget = ["--max-update", str(experiment.updates)]  # learning rate schedules are checked against it
        words = ["--task", experiment.task, *words, *budget]
        cfg = training_configuration([path_word(data), *words, *default_arguments(words)], settings)  # as smlp train
        check_pairs(cfg)
        settle_context(cfg.model, cfg.task)
        return config_of(cfg.model, vocab_size + (experiment.task == MASKED))  # and <mask>

    return plan_models(experiment, vocab_size, configure)


def spread_of(models: Sequence[Any]) -> float:
    """Return the ratio of the largest ``flops_per_token`` of some models to the smallest, less one."""
    costs = [model.flops_per_token for model in models]
    return max(costs) / min(costs) - 1


def check_spread(experiment: Experiment, models: list[PlannedModel]) -> None:
    """Check that the models cost the same.

    Raises:
        UserError: they do not; the message names the two that are furthest apart.
    """
    if spread_of(models) > experiment.max_spread:
        ordered = sorted(models, key=lambda model: model.flops_per_token)
        low, high = ordered[0], ordered[-1]
        raise UserError(
            f"{experiment.path}: forward FLOPs per token differ by {spread_of(models):.2%}, more than max_spread "
            f"{experiment.max_spread:.2%}: {low.name} {low.flops_per_token / 1e6:.3f} M, {high.name} "
            f"{high.flops_per_token / 1e6:.3f} M multiply-adds (smlp match finds settings that agree)"
        )


def family_of(arch: str) -> str | None:
    """Return the family of an architecture; None if it is not one of this package's."""
    return next((arch[: len(name)] for name in sorted(FAMILIES, key=len, reverse=True) if arch.startswith(name)), None)


def fitting_ranks(config: ModelConfig, num_ranks: int) -> int:
    """Return W, or the number of experts if W ranks cannot share them evenly."""
    num_experts = config.num_experts
    fits = not config.num_sparse_layers or num_experts % num_ranks == 0 or num_ranks % num_experts == 0
    return num_ranks if fits else num_experts


def _model_words(model: ModelEntry | PlannedModel) -> list[str]:
    """Return the architecture and settings of a model as options of fairseq-train."""
    return ["--arch", model.arch, *option_words(model.overrides)]


def shape_words(experiment: Experiment) -> list[str]:
    """Return the options of fairseq-train for the size of batches, the same for all models."""
    return [
        *("--tokens-per-sample", str(experiment.tokens_per_sample), "--batch-size", str(experiment.batch_size)),
        *("--update-freq", str(experiment.update_freq)),
        *("--required-batch-size-multiple", "1"),  # otherwise fairseq would reduce a batch of 12 to 8
    ]


def validations_of(experiment: Experiment, run: PlannedRun) -> int:
    """Return the number of validations in a training; only the end of a run of the grid counts."""
    return 1 if run.tuning else experiment.evaluation.validations


def training_words(experiment: Experiment, run: PlannedRun, data: str, save_dir: Path) -> list[str]:
    """Return the arguments of ``smlp train`` for a run."""
    interval = str(math.ceil(run.updates / validations_of(experiment, run)))  # the last one happens at the end
    words = [path_word(data), "--task", experiment.task, *_model_words(run.model), *shape_words(experiment)]
    words += ["--batch-size-valid", str(VALID_BATCHES * experiment.batch_size)]
    words += ["--valid-subset", ",".join(experiment.evaluation.subsets)]
    words += option_words({**experiment.recipe, **run.model.recipe, **run.recipe})
    words += ["--seed", str(run.seed), "--max-update", str(run.updates)]
    words += ["--validate-interval-updates", interval, "--save-interval-updates", interval]
    words += ["--validate-interval", _NEVER, "--save-interval", _NEVER]
    words += ["--no-epoch-checkpoints", "--keep-interval-updates", "1"]
    words += ["--log-format", "json", "--log-interval", str(min(experiment.log_interval, run.updates))]
    records = {"log_file": "train.log", "data_order_file": "data_order.jsonl"}
    records |= {"update_times_file": "update_times.jsonl", "environment_file": "environment.jsonl"}
    words += option_words({**{option: save_dir / name for option, name in records.items()}, "save_dir": save_dir})
    if experiment.resources.device == "cpu" or experiment.resources.tasks_per_node:
        words += ["--cpu"]
    return words


def launch_words(experiment: Experiment) -> list[str]:
    """Return the option of ``smlp train`` that starts the ranks of a run on this machine; on a cluster, srun does."""
    resources = experiment.resources
    return ["--nproc", str(resources.ranks)] if resources.where == "local" and resources.ranks > 1 else []


def tuning_runs(experiment: Experiment, models: list[PlannedModel]) -> list[PlannedRun]:
    """Return the runs of the grid."""
    tuning = experiment.tuning
    if tuning is None:
        return []
    return [
        PlannedRun(
            model, tuning.seed, tuning.updates, grid_folder(model.folder, value), {tuning.option: value}, tuning=True
        )
        for value in tuning.values
        for model in models
    ]


def main_runs(experiment: Experiment, models: list[PlannedModel], chosen: dict[str, Any]) -> list[PlannedRun]:
    """Return the runs of the comparison seed by seed, so that the first of them compare all models.

    Args:
        experiment: what the file says.
        models: planned.
        chosen: the tuned option's value for each model, by name.
    """
    tuning = experiment.tuning
    return [
        PlannedRun(
            model,
            seed,
            experiment.updates,
            f"runs/{model.folder}-s{seed}",
            {tuning.option: chosen[model.name]} if tuning is not None and model.name in chosen else {},
        )
        for seed in experiment.seeds
        for model in models
        if tuning is None or model.name in chosen
    ]


def as_json(experiment: Experiment, models: list[PlannedModel]) -> dict[str, Any]:
    """Return what ``experiment.json`` holds."""
    return {
        "name": experiment.name,
        "title": experiment.title,
        "seeds": list(experiment.seeds),
        "updates": experiment.updates,
        "tokens_per_update": experiment.tokens_per_update,
        "tokens": experiment.tokens,
        "tokens_per_sample": experiment.tokens_per_sample,
        "batch_size": experiment.batch_size,
        "update_freq": experiment.update_freq,
        "log_interval": experiment.log_interval,
        "max_spread": experiment.max_spread,
        "task": experiment.task,
        "evaluation_subsets": list(experiment.evaluation.subsets),
        "evaluation_dtype": experiment.evaluation.dtype,
        "validations": experiment.evaluation.validations,
        "targets": list(experiment.evaluation.targets),
        "tuned_option": experiment.tuning.option if experiment.tuning else None,
        "models": [model.as_json(experiment) for model in models],
    }


def not_done(folder: Folder, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that are not done."""
    return [run for run in runs if folder.run(run.folder).state()["state"] != DONE]


def print_models(experiment: Experiment, models: Sequence[PlannedModel]) -> None:
    """Print a line for each model, and the budget."""
    width = max(len(model.name) for model in models)
    print(f"{'model':<{width}}  {'M multiply-adds per token':>25}  {'M parameters':>12}  architecture")
    for model in models:
        total = parameters(model.config, 1).total
        settings = " ".join(f"{name}={value}" for name, value in model.overrides.items())
        print(
            f"{model.name:<{width}}  {model.flops_per_token / 1e6:>25.3f}  {total / 1e6:>12.1f}  "
            f"{model.arch} {settings}".rstrip()
        )
    for model in models:
        for name, reason in ignored_settings(model.config, PRESETS.get(model.arch, {})).items():
            print(f"{model.name}: {name} has no effect: {reason}")
    print(
        f"spread of the FLOPs {spread_of(models):.2%}; {experiment.tokens:,} tokens for each model and seed "
        f"({experiment.updates:,} updates of {experiment.tokens_per_update:,})",
        flush=True,
    )
