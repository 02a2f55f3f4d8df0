"""``smlp data glue``: GLUE's tasks, or sentences or pairs of your own, for fairseq's task ``sentence_prediction``."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.binarize.encoding import LINES, check_tokenizer
from data_prep.binarize.shards import token_type, with_ends, write_tokens
from data_prep.finetuning.glue_tasks import (
    TASKS,
    TEST,
    TRAIN,
    VALID,
    GlueTask,
    SplitFile,
    check_class,
    files_in,
    labels_of,
    read_rows,
)
from data_prep.flow.manifest import Counts, PartResult, is_whole, read_manifest, write_manifest
from data_prep.flow.options import (
    add_run_options,
    add_tokenizer_option,
    cached_tokenizer,
    check_apart,
    run_of,
    tokenizer_files,
    tokenizer_setting,
)
from data_prep.flow.parts import FilePart
from data_prep.flow.running import Report, aligned, begin, note_files, run_parts
from data_prep.flow.streams import sha256_of, write_bytes
from smlp.errors import UserError
from smlp.files import regular_file
from smlp.text.tokenizer_files import DICTIONARY, SPECIAL_SYMBOLS

DESCRIPTION = """prepare GLUE's tasks, or sentences or pairs of your own, for fairseq's task sentence_prediction

Reads the official TSV folders and writes OUT/input0, OUT/input1 (for pairs) and OUT/label. Class numbers are fixed by
the task, not by frequency as in fairseq-preprocess. dev becomes valid, and test needs no labels; for MNLI, valid is
matched and valid1 mismatched. Prints the command that fine-tunes on the data."""
EPILOG = """examples:
  smlp data glue --task MNLI --in glue/MNLI --tokenizer data/tokenizer --out data/mnli
  smlp data glue --task SST-2 --train a.tsv --valid b.tsv --tokenizer data/tokenizer --out data/sst2
  smlp data glue --columns sentence1,sentence2 --label label --train train.tsv --valid dev.tsv \\
      --tokenizer data/tokenizer --out data/pairs
"""
BLOCK_LINES = 10_000  # lines that are encoded at a time
MOST_LABELS = 20  # of a split on the terminal; the manifest has all of them
EPOCHS, BATCH_SIZE, POSITIONS, WARM_UP = 5, 32, 128, 0.1  # gMLP, appendix A, fine-tuning on SST-2 and MNLI


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the step."""
    group = parser.add_argument_group("input")
    group.add_argument("--task", choices=TASKS, help="a task of GLUE, which determines columns and labels")
    group.add_argument(
        "--columns",
        metavar="NAME[,NAME]",
        help="instead of --task: the columns of the sentences in files with a header",
    )
    group.add_argument("--label", metavar="NAME", help="with --columns: the column of the label")
    group.add_argument(
        "--labels", metavar="NAME,NAME", help="with --columns: classes in order (default: those of train, sorted)"
    )
    group.add_argument("--regression", action="store_true", help="with --columns: the label is a number to predict")
    group.add_argument(
        "--in", dest="folder", type=Path, metavar="DIR", help="folder with train.tsv, dev.tsv and, if any, test.tsv"
    )
    add_file_options(parser, group, "instead of --in: the file of train")


def run(args: argparse.Namespace) -> int:
    """Encode every split, write dictionaries and manifest; return the exit status."""
    task = _task_of(args)
    files = _files_of(args, task)
    vocab_size = len(check_tokenizer(args.tokenizer, LINES))
    if args.folder is not None:
        check_apart(args.out, [args.folder])
    if task.labels is None:
        task = replace(task, labels=labels_of(files[TRAIN], task))
    run = run_of(args)
    settings = {
        "task": args.task,
        "columns": list(task.columns),
        "label": task.label,
        "labels": list(task.labels or ()),
        "files": {split: str(file.path) for split, file in files.items()},
        "ids": {split: sha256_of(file.ids) for split, file in files.items() if file.ids},
        "tokenizer": tokenizer_setting(args.tokenizer),
    }
    begin(run, "glue", settings, args.restart)
    report = Report("glue", run)
    parts = [replace(FilePart.whole(file.path), name=split) for split, file in files.items()]
    work = functools.partial(encode_split, task=task, files=files, tokenizer=args.tokenizer)
    done = run_parts(run, "encode", parts, work)
    if done.results is None:
        return report.waiting(done, "the splits")
    if not is_whole(run.out, done.inputs, settings):
        splits = {part.name: result.facts for part, result in zip(parts, done.results, strict=True)}
        names = [f"input{number}" for number in range(len(task.columns))]
        paths = tokenizer_files(args.tokenizer)
        beside = {f"{name}/{path.name}": path.read_bytes() for name in names for path in paths}
        if task.labels:
            counts = splits[TRAIN]["labels"]
            content = "".join(f"{label} {counts[label]}\n" for label in task.labels)
            beside[f"label/{DICTIONARY}"] = content.encode()
        note_files(run.out, beside)
        outputs = [write_bytes(run.out / name, content, run.out) for name, content in beside.items()]
        facts = {"splits": splits, "dictionary": vocab_size, "classes": list(task.labels or ())}
        results = [*done.results, PartResult(outputs, Counts())]
        write_manifest(run.out, "glue", settings, done.inputs, results, facts)
    manifest = read_manifest(run.out, "glue")
    return report.finished(manifest, *_lines(manifest["splits"]), "", *command(run.out, task, manifest["splits"]))


def _task_of(args: argparse.Namespace) -> GlueTask:
    if (args.task is None) == (args.columns is None):
        raise UserError("give --task, or --columns and --label for files of your own")
    if args.task is not None:
        given = [name for name in ("label", "labels", "regression") if getattr(args, name)]
        if given:
            raise UserError(f"--{given[0]} is only for --columns: --task {args.task} determines it")
        return TASKS[args.task]
    columns = tuple(args.columns.split(","))
    if len(columns) > 2 or not all(columns) or len(set(columns)) < len(columns):
        raise UserError(
            f"--columns {args.columns!r}: one or two different names with a comma between them are expected"
        )
    if args.label is None or args.label in columns:
        raise UserError("--columns needs --label, the name of another column")
    if args.regression:
        if args.labels:
            raise UserError("--labels names classes, but --regression has none: give one of the two")
        report = "--report-pearson-and-spearman"
        return GlueTask(columns, args.label, (), metric="pearson_and_spearman", report=report)
    labels = tuple(args.labels.split(",")) if args.labels else None
    if labels is not None and (len(labels) < 2 or not all(labels) or len(set(labels)) < len(labels)):
        raise UserError(f"--labels {args.labels!r}: at least two different names with commas between them are expected")
    for label in labels or ():
        check_class(label, "--labels")
    return GlueTask(columns, args.label, labels)


def _files_of(args: argparse.Namespace, task: GlueTask) -> dict[str, SplitFile]:
    """Return the file of each split.

    Raises:
        UserError: one is missing, or none is named.
    """
    named = named_files(args)
    if (args.folder is None) == (not named):
        raise UserError("name the files with --in DIR or with --train, --valid and --test, not both")
    if args.folder is not None:
        return files_in(args.folder, task)
    if TRAIN not in named:
        raise UserError("--train is missing: it defines the labels and the training examples")
    return {split: SplitFile(path) for split, path in named.items()}


def add_file_options(parser: argparse.ArgumentParser, group: Any, of_train: str) -> None:
    """Declare ``--train`` (with its help), ``--valid`` and ``--test`` in a group, the tokenizer and the running."""
    group.add_argument("--train", type=Path, metavar="FILE", help=of_train)
    for split in (VALID, TEST):
        help_text = f"files of {split}, {split}1, ..."
        group.add_argument(f"--{split}", type=Path, nargs="+", metavar="FILE", help=help_text)
    add_tokenizer_option(parser.add_argument_group("output"), ", as the model was trained with")
    add_run_options(parser)


def named_files(args: argparse.Namespace) -> dict[str, Path]:
    """Return the files of ``--train``, ``--valid`` and ``--test`` by split: several of valid are valid, valid1, ...

    Raises:
        UserError: one is missing, or no regular file.
    """
    files = {}
    for split in (TRAIN, VALID, TEST):
        paths = getattr(args, split) or []
        for number, path in enumerate([paths] if isinstance(paths, Path) else paths):
            try:
                files[f"{split}{number or ''}"] = regular_file(path)
            except UserError as error:
                raise UserError(f"--{split}: {error}") from None
    return files


def encode_split(part: FilePart, out: Path, task: GlueTask, files: dict[str, SplitFile], tokenizer: Path) -> PartResult:
    """Write the sentences and labels of one split.

    Raises:
        UserError: as :func:`read_rows`.
    """
    split, encoder = part.name, cached_tokenizer(tokenizer)
    vocabulary = encoder.vocabulary
    dtype = token_type(len(vocabulary))
    rows = read_rows(files[split], task, split)
    outputs, lengths, unknown = [], [], 0
    for number, texts in enumerate(rows.texts):
        blocks = [encoder.encode_batch(texts[at : at + BLOCK_LINES]) for at in range(0, len(texts), BLOCK_LINES)]
        ids_N, lengths_L = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        if not lengths_L.all() and not (task.leaves_out and split.startswith(TEST)):
            raise UserError(f"{files[split].path}: the sentence {texts[lengths_L.argmin()]!r:.80} has no token")
        unknown += int(np.count_nonzero(ids_N == vocabulary.unk))
        lengths.append(lengths_L + 1)
        tokens_N = with_ends(ids_N, lengths_L, vocabulary.eos, dtype)
        outputs += write_tokens(out, f"input{number}/{split}", tokens_N, lengths[-1], dtype)
    found: Counter[str] = Counter()
    if rows.labels is not None and task.labels:
        found.update(rows.labels)
        ids_L = np.array([len(SPECIAL_SYMBOLS) + task.labels.index(label) for label in rows.labels])
        ends_L2 = np.stack([ids_L, np.full_like(ids_L, vocabulary.eos)], axis=1)
        dtype = token_type(len(SPECIAL_SYMBOLS) + len(task.labels))
        outputs += write_tokens(out, f"label/{split}", ends_L2.ravel(), np.full(len(ids_L), 2), dtype)
    elif rows.labels is not None:
        content = "".join(f"{label}\n" for label in rows.labels)
        outputs.append(write_bytes(out / f"label/{split}.label", content.encode(), out))
    length_L = 1 + sum(lengths)  # with <s>
    facts = {
        "rows": len(length_L),
        "tokens": int(length_L.sum()),
        "unknown": unknown,
        "longest": int(length_L.max()),
        "too_long": int((length_L > POSITIONS).sum()),
        "labels": {label: found[label] for label in task.labels or ()} if rows.labels is not None else None,
    }
    return PartResult(outputs, Counts(other=rows.left_out), facts=facts)


def _lines(splits: dict[str, dict[str, Any]]) -> list[str]:
    """Return lines for the terminal: what each split holds."""
    rows = [("split", "rows", "tokens", "unknown", "longest", f"above {POSITIONS}", "labels")]
    for split, facts in splits.items():
        labels = facts["labels"]
        most = list((labels or {}).items())[:MOST_LABELS]
        said = ", ".join(f"{label}: {count:,}" for label, count in most)
        said = "none" if labels is None else said + (", ..." if len(labels) > len(most) else "")
        numbers = (facts[name] for name in ("rows", "tokens", "unknown", "longest", "too_long"))
        rows.append((split, *(f"{number:,}" for number in numbers), said or "numbers"))
    return aligned(rows, right=range(1, 6)).split("\n")


def command(out: Path, task: GlueTask, splits: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the command that fine-tunes on the data, as the gMLP paper does on SST-2 and MNLI."""
    valid = [split for split in splits if split.startswith(VALID)]
    updates = -(-splits[TRAIN]["rows"] // BATCH_SIZE) * EPOCHS
    classes = f"--num-classes {len(task.labels)}" if task.labels else "--num-classes 1 --regression-target"
    lines = [
        f"fairseq-train {shlex.quote(str(out))} --user-dir $(smlp user-dir) --arch ARCH --save-dir DIR",
        "--finetune-from-model PRETRAINED.pt",
        f"--task sentence_prediction --criterion sentence_prediction {classes}",
        f"--init-token 0 --max-positions {POSITIONS} --shorten-method truncate",
        f"--batch-size {BATCH_SIZE} --max-epoch {EPOCHS} --optimizer adam --adam-betas '(0.9,0.999)' --adam-eps 1e-6",
        f"--weight-decay 0.01 --dropout 0.1 --lr 2e-5 --lr-scheduler polynomial_decay --total-num-update {updates}",
        f"--warmup-updates {round(WARM_UP * updates)} --no-epoch-checkpoints",
        f"--valid-subset {','.join(valid)} {task.report} --best-checkpoint-metric {task.metric} "
        "--maximize-best-checkpoint-metric"
        if valid
        else "--disable-validation",
    ]
    return command_lines(lines)


def command_lines(lines: list[str]) -> list[str]:
    """Return a command of several lines as the terminal shows it; empty options leave no gaps."""
    *first, last = (f"  {' '.join(line.split())}" for line in lines)
    return ["to fine-tune:", *(f"{line} \\" for line in first), last]
