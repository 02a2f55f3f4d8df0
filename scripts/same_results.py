"""Prove that a change of the code changes no result.

    python scripts/same_results.py record DIR [--tree OTHER_CHECKOUT]
    python scripts/same_results.py check DIR

``record`` trains every tiny preset on one rank and on two, scores the checkpoints, counts FLOPs, compares two models,
answers zero-shot tasks and asks every command for its help; all of it is kept in DIR. ``check`` does the same with the
present code, but scores the checkpoints of DIR, and lists every difference. Only commands are run and nothing of
``smlp`` is imported, so that any two revisions can be compared on one machine. Both take about ten minutes.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "w3 w21"
TINY = ["--tokens-per-sample", "32", "--batch-size", "4", "--embed-dim", "64", "--cpu", "--seed", "3"]
EXPERIMENT = """{title: two models, data: DATA, updates: 8, seeds: [1, 2], tokens_per_sample: 32, batch_size: 4,
log_interval: 1, recipe: {optimizer: adam, lr: 2.0e-3, clip_norm: 1.0, dropout: 0}, max_spread: 0.5,
models: {gMLP: {arch: gmlp_lm_tiny, embed_dim: 64}, sMLP: {arch: smlp_tiny, embed_dim: 64}},
evaluate: {validations: 2, speed_rounds: 2}, run: {jobs: 1, threads: 1, device: cpu}}"""
# Names of fields, and sources of a report's cells, that say how fast, when or where something ran.
_VOLATILE = re.compile(
    r"time|seconds?$|_s$|per_second|speed|memory|mem_gb|mfu|data_wait|wps|(^|_)ups$|wall$|environment|version|run\.json"
)
_LEFT_OUT = "left out"
# Several commands in one process, which starts and imports torch once.
_EACH = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    sys.argv = ["smlp", *words]
    try:
        runpy.run_module("smlp", run_name="__main__")
    except SystemExit as end:
        if end.code:
            sys.exit(f"smlp {' '.join(words)}: {end.code}")
"""


class Failure(Exception):
    """A command failed."""


class Steps:
    """Run the steps with the code of ``tree`` in the folder ``out``, from the checkpoints and data in ``base``."""

    def __init__(self, tree: Path, out: Path, base: Path) -> None:
        self.tree, self.out, self.base = tree, out, base
        code = "import json, smlp; print(json.dumps([smlp.__file__, *smlp.PRESETS]))"
        found, *self.presets = json.loads(self.run("-c", code))
        if not Path(found).resolve().is_relative_to(tree):
            raise Failure(f"{found} would be run, which is not in {tree}")

    def run(self, *words: object) -> str:
        """Run ``python WORDS`` in ``out`` and return what it printed; raise ``Failure`` with its last lines."""
        command = [sys.executable, *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=self.out, env=environment)
        if done.returncode != 0:
            last = (done.stderr or done.stdout).strip().splitlines()[-2:]
            raise Failure(f"{' '.join(command[2:])[:200]}: exit status {done.returncode}, {' | '.join(last)}")
        return done.stdout

    def smlp(self, *words: object) -> str:
        return self.run("-m", "smlp", *words)

    def smlp_each(self, commands: list[list]) -> None:
        """Run several commands of smlp, one after the other."""
        self.run("-c", _EACH, json.dumps([[str(word) for word in words] for words in commands]))

    def all(self) -> dict[str, Callable[[], Any]]:
        """Return the steps by name, in their order."""
        tiny = [name for name in self.presets if name.endswith("_tiny")]
        train = {f"train-{name}-{ranks}": partial(self.train, name, ranks) for ranks in (1, 2) for name in tiny}
        score = {"resume": self.resume, "score": partial(self.score, tiny), "zeroshot": self.zeroshot}
        return {"data": self.data, **train, **score, "compare": self.compare, "flops": self.flops, "help": self.help}

    def data(self) -> dict:
        """Make text, vocabulary, binary data and zero-shot tasks."""
        sys.path.extend(str(path.parent) for path in (ROOT / "tests").rglob("zeroshot_data.py"))
        from zeroshot_data import WORDS, write_tasks

        write_tasks(self.out / "tasks")
        draw = random.Random(1)
        (self.out / "text").mkdir(exist_ok=True)
        for split, count in {"train": 400, "valid": 40, "test": 40}.items():
            lines = []
            for number in range(count):
                first = draw.randrange(30)
                words = [WORDS[first], WORDS[first * 7 % 30], *draw.choices(WORDS, k=draw.randint(1, 4)), "."]
                lines.append(" ".join(words) + ("\n\n" if number % 4 == 3 else "\n"))
            (self.out / "text" / f"{split}.txt").write_text("".join(lines))
        self.smlp("data", "tokenizer", "--in", "text", "--kind", "bpe", "--vocab-size", 80, "--out", "tokenizer")
        self.smlp("data", "binarize", "--in", "text", "--tokenizer", "tokenizer", "--out", "data")
        made = [path for name in ("text", "tokenizer", "data", "tasks") for path in (self.out / name).rglob("*.*")]
        # Manifests and what is kept for the next call have times.
        files = sorted(
            path for path in made if path.is_file() and path.name != "manifest.json" and ".state" not in path.parts
        )
        return {str(path.relative_to(self.out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def train(self, arch: str, ranks: int, updates: int = 20, name: str = "", more: tuple = ()) -> dict:
        """Train; return what was logged of every update and validation, and a digest of every saved tensor."""
        run = self.out / "runs" / (name or f"{arch}-{ranks}")
        log = run.with_suffix(".log")
        shutil.rmtree(run, ignore_errors=True)  # of a record that was interrupted
        log.unlink(missing_ok=True)
        words = [*(["--nproc", ranks] if ranks > 1 else []), self.base / "data", "--arch", arch, *TINY, *more]
        words += ["--max-update", updates, "--no-epoch-checkpoints", "--log-format", "json", "--log-interval", 1]
        words += ["--save-dir", run, "--log-file", log, "--data-order-file", run / "data_order.jsonl"]
        self.smlp("train", *words)
        (run / "checkpoint_best.pt").unlink()  # the same as the last
        found = re.findall(r'\{"epoch".*\}$', log.read_text(), re.M)
        logged = [{key: value and float(value) for key, value in json.loads(line).items()} for line in found]
        lines = {path.name: _json_lines(path) for path in sorted(run.glob("*.jsonl"))}
        return {"logged": logged, **lines, "tensors": {key: digest(value) for key, value in tensors(run)}}

    def resume(self) -> dict:
        """Train on from a recorded checkpoint whose experts are in parts."""
        restore = ("--restore-file", self.base / "runs" / "smlp_tiny-2" / "checkpoint_last.pt")
        return self.train("smlp_tiny", 2, 24, "resumed", restore)

    def score(self, archs: list[str]) -> dict:
        """Score recorded checkpoints line by line, those of two ranks in parts, and continue a prompt."""
        commands, out = [], self.out / "scores"
        out.mkdir(exist_ok=True)
        decoders = [arch for arch in archs if "_mlm" not in arch]  # encoders score no text
        for name in [f"{arch}-{ranks}" for arch in decoders for ranks in (1, 2)]:
            path = self.base / "runs" / name / "checkpoint_last.pt"
            words = ["eval-lm", self.base / "data", "--path", path, "--gen-subset", "valid", "--batch-size", 4]
            words += ["--json", out / f"{name}.json", "--document", "line", "--per-document", out / f"{name}.jsonl"]
            commands.append(words)
            if "leaky" not in name:  # which cannot write
                words = ["generate", "--path", path, "--prompt", PROMPT, "--greedy", "--fill-prefix"]
                commands.append([*words, "--max-tokens", 20, "--output", out / f"{name}-text.jsonl"])
        self.smlp_each(commands)
        lines = {path.name: _json_lines(path) for path in sorted(out.glob("*.jsonl"))}
        return {**lines, **{path.name: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}}

    def flops(self) -> dict:
        """Count parameters and FLOPs of every preset."""
        reports = {name: self.out / f"flops-{name}.json" for name in self.presets}
        self.smlp_each([["flops", "--arch", name, "--json", report] for name, report in reports.items()])
        return {name: json.loads(report.read_text()) for name, report in reports.items()}

    def compare(self) -> dict:
        """Compare two models; return the report and the names of all files."""
        file = self.out / "two_models.yaml"  # its name is in the report
        file.write_text(EXPERIMENT.replace("DATA", str(self.base / "data")))
        self.smlp("compare", "run", file, "--out", "compare")
        self.smlp("compare", "report", "compare")
        folder = self.out / "compare"
        files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        report = json.loads((folder / "report" / "report.json").read_text())
        return {"report": report, "files": {name: True for name in files if not name.endswith(".patch")}}

    def zeroshot(self) -> dict:
        """Answer all tasks with a recorded checkpoint."""
        report, answers = self.out / "zeroshot.json", self.out / "answers.jsonl"
        words = ["--path", self.base / "runs" / "smlp_tiny-1" / "checkpoint_last.pt", "--data-dir", self.base / "tasks"]
        words += ["--tasks", "all", "--skip-too-long", "--json", report, "--output", answers]
        self.smlp("zeroshot", *words)
        return {"report": json.loads(report.read_text()), "answers": _json_lines(answers)}

    def help(self) -> dict:
        """Return the help of every command, and of fairseq-train with this package loaded."""
        pages, left = {}, [()]
        for words in left:
            page = pages[" ".join(("smlp", *words))] = self.smlp(*words, "--help")
            names = re.search(r"^commands:\n(.*?)\n\n|^  [A-Z]+\n(    .*?)\n\n", page, re.M | re.S)
            found = re.findall(r"^ {2,4}([a-z][\w-]*)(?:  |$)", (names[1] or names[2]) if names else "", re.M)
            left += [(*words, name) for name in found]
        words = ["--user-dir", self.smlp("user-dir").strip(), "--task", "language_modeling", "--arch", "smlp_tiny"]
        train = self.run("-m", "fairseq_cli.train", *words, "--criterion", "moe_cross_entropy", "--help")
        return {**pages, "fairseq-train": train[train.index("usage:") :]}


def _json_lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tensors(run: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of every tensor in the checkpoints of a save-dir, the optimizer's too."""
    for path in sorted(run.rglob("*.pt")):
        file = re.sub(r"_[0-9a-f]{8}/", "/", str(path.relative_to(run)))  # parts are in a folder with a random name
        for name, value in flat(torch.load(path, map_location="cpu", weights_only=True), file):
            if isinstance(value, torch.Tensor):
                yield name, value


def digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and SHA-256 of the bytes of a tensor."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def lasting(value: Any, places: dict[str, str]) -> Any:
    """Return a result without what another run of the same code may change: times, speeds, versions and folders."""
    if isinstance(value, str):
        for folder, name in places.items():
            value = value.replace(folder, name)
    if isinstance(value, list):
        return [lasting(item, places) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {
        key: _LEFT_OUT if _VOLATILE.search(key) or _VOLATILE.search(_source(item)) else lasting(item, places)
        for key, item in value.items()
    }
    if _LEFT_OUT in kept.values():  # a verdict on speeds
        kept = {key: _LEFT_OUT if _source(value[key]).startswith("computed") else kept[key] for key in kept}
    return kept


def _source(value: Any) -> str:
    return str(value.get("source", "")) if isinstance(value, dict) else ""


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of every leaf of nested dictionaries, lists and tuples."""
    if isinstance(value, dict | list | tuple) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(item, f"{name}/{key}" if name else str(key))
    else:
        yield name, value


def _lines_between(old: Any, new: Any) -> list[str]:
    if isinstance(old, str) and isinstance(new, str) and "\n" in old:  # a page of help
        lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""))[2:]
        return [f"    {line}" for line in lines if not line.startswith("@@")]
    return [f"    was {old!r}", f"    is  {new!r}"]


def differences(old: Any, new: Any) -> tuple[list[str], float]:
    """Compare two results: one is what DIR has of a step and the other what came out now, None if there is none.

    Returns:
        lines that list every value that differs, and the largest difference of two numbers among them.
    """
    if old is None or new is None:
        return [f"  the step is {'not in the record' if old is None else 'missing now'}"], 0.0
    old, new = dict(flat(old)), dict(flat(new))
    lines, largest = [], 0.0
    for name in [*old, *(name for name in new if name not in old)]:
        ours, theirs = new.get(name, "nothing"), old.get(name, "nothing")
        if json.dumps(ours) != json.dumps(theirs):  # so that nan equals nan, and 1 is not 1.0
            lines += [f"  {name}", *_lines_between(theirs, ours)]
            if isinstance(ours, int | float) and isinstance(theirs, int | float):
                largest = max(largest, abs(ours - theirs))
    return lines, largest


def largest_tensor_difference(old: Path, new: Path) -> float:
    """Return the largest difference of two elements in the checkpoints of two save-dirs."""
    ours, largest = dict(tensors(new)), 0.0
    for name, tensor in tensors(old):
        if name in ours and ours[name].shape == tensor.shape and tensor.numel():
            largest = max(largest, float((ours[name].double() - tensor.double()).abs().max()))
    return largest


def run_steps(steps: Steps, only: str, may_fail: bool) -> Iterator[tuple[str, Any]]:
    """Do the steps that have no result yet; yield name and result of each."""
    places = {str(steps.out): "DIR", str(steps.base): "DIR", str(steps.tree): "TREE"}
    for folder in ("results", "runs"):
        (steps.out / folder).mkdir(parents=True, exist_ok=True)
    for name, step in steps.all().items():
        file, start = steps.out / "results" / f"{name}.json", time.monotonic()
        if file.is_file() or not fnmatch.fnmatch(name, only):
            continue
        try:
            result = json.loads(json.dumps(lasting(step(), places)))
        except (Failure, OSError, LookupError, ValueError, subprocess.TimeoutExpired) as error:
            if not may_fail:
                raise Failure(f"step {name}: {error}") from error
            result = {"failed": f"{type(error).__name__}: {error}"}
        file.with_suffix(".part").write_text(json.dumps(result, indent=1))
        file.with_suffix(".part").rename(file)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        yield name, result


def check(steps: Steps, only: str) -> bool:
    """List every difference to the record; return whether there is none."""
    files = {path.stem: path for path in sorted((steps.base / "results").glob("*.json"))}
    recorded = {name: json.loads(path.read_text()) for name, path in files.items() if fnmatch.fnmatch(name, only)}
    num_done = num_different = 0
    for name, result in run_steps(steps, only, may_fail=True):
        num_done += 1
        num_different += _show(steps, name, recorded.pop(name, None), result)
    num_different += sum(_show(steps, name, result, None) for name, result in recorded.items())
    print(f"{num_done} steps done, {num_different} differ from the record")
    return num_done > 0 and num_different == 0


def _show(steps: Steps, name: str, old: Any, new: Any) -> bool:
    """Print how the results of a step differ; return whether they do."""
    lines, largest = differences(old, new)
    if lines:
        note = f", numbers by up to {largest:.3g}" if largest else ""
        run = "resumed" if name == "resume" else name.removeprefix("train-")
        if any(line.startswith("  tensors/") for line in lines):
            between = largest_tensor_difference(steps.base / "runs" / run, steps.out / "runs" / run)
            note += f", tensors by up to {between:.3g}"
        print("\n".join([f"{name} differs{note}", *lines]), flush=True)
    return bool(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of the record")
    parser.add_argument("--tree", type=Path, default=ROOT, help="run the code of this checkout (default: this one)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only these steps, such as 'train-smlp_*'")
    options = parser.parse_args()
    folder, tree = options.folder.resolve(), options.tree.resolve()
    try:
        if options.action == "record":
            folder.mkdir(parents=True, exist_ok=True)
            steps = Steps(tree, folder, folder)
            if not fnmatch.filter(steps.all(), options.only):
                raise Failure(f"--only {options.only!r}: there is no such step")
            print(f"{len(list(run_steps(steps, options.only, may_fail=False)))} steps recorded in {folder}")
            return 0
        if not (folder / "results").is_dir():
            raise Failure(f"{folder} has no record: there is no folder results")
        with tempfile.TemporaryDirectory() as out:
            return 0 if check(Steps(tree, Path(out).resolve(), folder), options.only) else 1
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
