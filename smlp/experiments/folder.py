"""The files of an experiment, and the state of each run; docs/compare.md lists them."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from smlp.checkpoint.index import remove_unused_parts
from smlp.config import plugins
from smlp.errors import UserError
from smlp.experiments.json_files import DATA, EXPERIMENT, RUN, read_json, write_json
from smlp.experiments.yaml_file import number_in
from smlp.fairseq_compat.saving import remove_leftovers
from smlp.files import is_locked, locked

#: states of a run
WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"
#: environment variables that affect training
_OWN_VARIABLES = (plugins.VARIABLE, "SMLP_REFERENCE_OPS", "PYTHONPATH")
#: end of the names of checksums in what a run is made with
_CHECKSUM = "_sha256"
#: of a model, also those that its architecture or a plug-in gives, in what a run is made with
SETTINGS = "settings"
#: settings that must be the same for all runs of a folder
_SHARED = (
    *("updates", "tokens_per_update", "tokens_per_sample", "batch_size", "update_freq", "tuned_option", "data_sha256"),
)


class Folder:
    """The paths in the folder of an experiment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.experiment = path / "experiment.json"
        self.yaml = path / "experiment.yaml"
        self.environment = path / "environment.json"
        self.data = path / "data.json"
        self.tuned = path / "tuned.json"
        self.speed = path / "speed.json"

    def run(self, name: str) -> RunFolder:
        """Return the folder of a run: ``runs/MODEL-sSEED`` or ``tune/MODEL-VALUE``."""
        return RunFolder(self.path / name)

    def locked(self, command: str = "smlp compare run") -> AbstractContextManager[None]:
        """Keep other processes out of the folder while a command works there.

        Raises:
            UserError: another process works there, or the folder cannot be made.
        """
        return locked(self.path, command)

    def is_locked(self) -> bool:
        """Return whether a process works in the folder."""
        return is_locked(self.path)

    def check(self, planned: dict[str, Any]) -> None:
        """Refuse an experiment that cannot be compared with the one that was recorded before.

        It may add models and seeds. What each run was made with is in its own record (:meth:`RunFolder.check`).

        Raises:
            UserError: the message names the first setting that differs.
        """
        if self.experiment.is_file():
            older = read_json(self.experiment, EXPERIMENT)
            for name in _SHARED:
                if name in planned:  # a dry run does not read the data
                    _check_same(self.path, name, older.get(name), planned[name])
            if "validations" in older:  # records of earlier versions lack it
                _check_same(self.path, "evaluate.validations", older["validations"], planned["validations"])
        for model in planned["models"]:  # two names may lead to one folder, such as A and A.
            for seed in planned["seeds"]:
                own = self.run(f"runs/{model['folder']}-s{seed}")
                if own.is_begun:
                    _check_same(own.path, "model", own.state().get("model", model["name"]), model["name"])

    def settle(self, planned: dict[str, Any]) -> None:
        """Record the planned experiment.

        Raises:
            UserError: as :meth:`check`.
        """
        self.check(planned)
        write_json(self.experiment, planned)

    def check_data(self, described: dict[str, Any]) -> None:
        """Refuse other held-out text than that of ``data.json``, on which runs may have been scored.

        Raises:
            UserError: the message names the split.
        """
        if not self.data.is_file():
            return
        older = read_json(self.data, DATA)
        facts = [("sha256 of dict.txt", older.get("dictionary_sha256"), described["dictionary_sha256"])]
        for name, split in described["splits"].items():
            found = older["splits"].get(name) or {}
            facts += [(f"{key} of {name}", found.get(key), split.get(key)) for key in ("sha256", "words", "bytes")]
        for what, before, after in facts:
            if None not in (before, after):  # a split or a tokenizer may be added
                _check_same(self.path, f"the {what}", before, after)


class RunFolder:
    """The files of one run; its folder is fairseq's save-dir as well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "train.log"
        self.order = path / "data_order.jsonl"
        self.output = path / "output.txt"
        self.command = path / "command.txt"
        self.state_file = path / "run.json"
        self.scores = path / "scores.json"
        self.zeroshot = path / "zeroshot.json"

    def state(self) -> dict[str, Any]:
        """Return what ``run.json`` says; a run without it is waiting."""
        state = {"state": WAITING, "message": None, "attempts": [], "peak_memory_mib": None}
        return {**state, **read_json(self.state_file, RUN)} if self.state_file.is_file() else state

    def update_state(self, **changes: Any) -> None:
        """Change entries of ``run.json``."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.state_file, {**self.state(), **changes})

    def write_command(self, words: list[str], variables: dict[str, str]) -> None:
        """Write down the command that trains and the variables set for it, so that a shell can repeat it.

        Args:
            words: program and arguments.
            variables: of the environment, over those of this process.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        given = {name: os.environ[name] for name in _OWN_VARIABLES if os.environ.get(name)}
        settings = [f"{name}={shlex.quote(value)}" for name, value in {**given, **variables}.items()]
        lines = [
            f"cd {shlex.quote(str(Path.cwd()))}",
            *(f"export {setting}" for setting in settings),
            shlex.join(words),
        ]
        self.command.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def check(self, made_with: dict[str, Any]) -> None:
        """Refuse to go on with weights that were made with something else.

        Raises:
            UserError: the message names the first setting that differs.
        """
        before = self.state().get("made_with")
        if before is not None and self.is_begun:
            check_made_with(self.path, before, made_with)

    @property
    def is_begun(self) -> bool:
        """Return whether it has weights, or had them."""
        return bool(self.state().get("trained")) or self.last_checkpoint().is_file()

    def is_made_with(self, made_with: dict[str, Any]) -> bool:
        """Return whether the run was last claimed with these settings."""
        before = self.state().get("made_with")
        try:
            check_made_with(self.path, made_with if before is None else before, made_with)
        except UserError:
            return False
        return True

    def claim(self, made_with: dict[str, Any]) -> None:
        """Write down what the run is made with, before it begins.

        Raises:
            UserError: as :meth:`check`.
        """
        self.check(made_with)
        before, after = self.state().get("made_with"), _plain(made_with)
        if before is not None and self.is_begun:  # the checksum of a file that is gone still counts for the next
            after = {key: before[key] for key in before if key.endswith(_CHECKSUM)} | after
            if SETTINGS not in before:  # of an earlier version, whose weights may be of other settings than today's
                after.pop(SETTINGS, None)
        if before != after:
            is_same = self.is_begun or self.is_made_with(made_with)
            again = {} if is_same else {"submitted": []}  # the jobs before were of something else
            self.update_state(made_with=after, **again)

    def last_checkpoint(self) -> Path:
        """Return the path of the checkpoint from the end of the budget, or from where the run was stopped."""
        return self.path / "checkpoint_last.pt"

    def drop_checkpoints(self, keep_last: bool) -> None:
        """Remove checkpoints that are no longer needed, with the experts that are spread over files of their own."""
        remove_leftovers(self.path)
        for path in self.path.glob("checkpoint*.pt"):
            if not path.is_dir() and not (keep_last and path.name.startswith("checkpoint_last")):
                path.unlink()
        remove_unused_parts(self.path)


def check_made_with(folder: Path, before: dict[str, Any], made_with: dict[str, Any]) -> None:
    """Refuse to go on in a folder with what was made with something else.

    Raises:
        UserError: the message names the first setting that differs.
    """
    for key in {**before, **made_with}:
        if key == SETTINGS or (key.endswith(_CHECKSUM) and (before.get(key) is None or made_with.get(key) is None)):
            continue  # looked at below, or of a file that is gone, or a record of an earlier version
        _check_same(folder, key, number_in(before.get(key)), number_in(made_with.get(key)))
    older, newer = (_plain(one.get(SETTINGS) or {}) for one in (before, made_with))
    for name in older:
        if name in newer and older[name] != newer[name]:  # a plug-in or a version of this package may add some
            _check_same(folder, name, older[name], newer[name], f"{made_with['arch']}, or a plug-in,")


def _check_same(folder: Path, name: str, before: Any, after: Any, source: str = "the experiment") -> None:
    if _plain(before) != _plain(after):
        raise UserError(f"{folder} was made with {name} = {before}, and {source} now says {after}: give another --out")


def _plain(value: Any) -> Any:
    """Return a value as it comes back from a JSON file."""
    return json.loads(json.dumps(value))
