"""``smlp data dedup``: options, phases, manifest, report."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.contamination import MIN_NGRAM, NGRAM, index_tasks, read_tasks, summary
from data_prep.dedup.files import CONTAMINATED, REMOVED, Signed
from data_prep.dedup.groups import exact_pairs, first_of_each, near_pairs, pairs_name, partition_parts
from data_prep.dedup.passes import Decisions, SignSettings, outputs_of_part, sign_part, write_part
from data_prep.dedup.signatures import WORDS, Scheme
from data_prep.flow.documents import FORMATS
from data_prep.flow.manifest import WORK, Counts, PartResult, counts_of, write_manifest
from data_prep.flow.options import (
    COMPRESSIONS,
    add_compression,
    add_input_options,
    add_number,
    add_run_options,
    input_settings,
    reading_of,
    run_of,
)
from data_prep.flow.parts import FilePart, find_files, plan_parts, report_left_out, unique_name
from data_prep.flow.running import STATE, Finished, Report, StepRun, aligned, begin, forget, run_parts
from data_prep.flow.streams import compression_of, write_bytes, write_stream
from smlp.cli.numbers import real, whole
from smlp.cli.options import refuse_unused
from smlp.errors import UserError, one_line
from smlp.evaluation.zeroshot.readers import READERS
from smlp.files import NamedFile

DESCRIPTION = (
    "Remove documents that repeat another one, exactly or nearly, within and across inputs, and held-out documents; "
    "report or remove those that overlap with the zero-shot tasks."
)
EPILOG = """example:
  smlp data dedup --in data/books data/web --out data/unique --held-out my/valid.txt --workers 8
  smlp data dedup --in data/clean --out data/unique --decontaminate tasks --decontaminate-action remove

The first of several copies stays: inputs in the order given, documents in the order of their files.
"""
PARTITION_BYTES = 64 << 20
_EXPANSION = 4  # rough expansion factor of compressed text
MAX_PARTITIONS = 4096  # a phase has a file per partition, and reads a piece of every part for each
MAX_ROWS = 20  # most pairs of sources on the terminal; the manifest has all of them


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the step."""
    add_input_options(parser)
    group = parser.add_argument_group("duplicates")
    group.add_argument(
        "--held-out",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="documents of your own for validation or test: documents of --in that repeat one of them are removed",
    )
    group.add_argument("--no-near", dest="near", action="store_false", help="remove exact duplicates only: much faster")
    add_number(
        group, "--threshold", real(0.1, 1), "Jaccard similarity of near duplicates (default: 0.8)", 0.8, metavar="X"
    )
    add_number(group, "--num-perm", whole(16, 4096), "entries in a signature (default: 128)", 128)
    add_number(group, "--ngram", whole(), "words in a run (default: 5)", 5)
    add_number(group, "--seed", whole(0, (1 << 32) - 1), "seed of the signatures (default: 1)", 1)
    add_number(
        group,
        "--partitions",
        whole(1, MAX_PARTITIONS),
        "partitions of the rows on disk, up to 4096 (default: one for each 64 MiB)",
    )
    group = parser.add_argument_group("zero-shot tasks")
    group.add_argument(
        "--decontaminate", type=Path, metavar="DIR", help="compare with the tasks that 'smlp zeroshot --data-dir' reads"
    )
    group.add_argument(
        "--decontaminate-action",
        choices=("report", "remove"),
        default="report",
        help="count documents that overlap with a task, or remove them too (default: report)",
    )
    group.add_argument(
        "--decontaminate-splits",
        choices=("scoring", "all"),
        default="scoring",
        help="the splits that are scored by default, or all of them (default: scoring)",
    )
    add_number(
        group,
        "--decontaminate-ngram",
        whole(),
        f"words in a row that make an overlap; shorter texts count as a whole from {MIN_NGRAM} words on "
        f"(default: {NGRAM})",
        NGRAM,
    )
    add_compression(parser)
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the phases that are not done, and report how many documents were kept and removed."""
    groups = (
        (
            "--decontaminate",
            args.decontaminate,
            ["decontaminate_action", "decontaminate_splits", "decontaminate_ngram"],
        ),
        ("near duplicates, and --no-near is given", args.near, ["threshold", "num_perm", "ngram", "seed"]),
    )
    refuse_unused(args, add_options, "{option} would not be used: it is for {companion}", groups)
    reading, run = reading_of(args), run_of(args)
    held_out, inputs = _plan(args)
    scheme = Scheme.for_threshold(args.threshold, args.num_perm, args.ngram, args.seed) if args.near else None
    recorded = _settings(args, scheme)
    texts = read_tasks(args.decontaminate, args.decontaminate_splits) if args.decontaminate else None
    begin(run, "dedup", recorded, args.restart)
    num_partitions = args.partitions or _num_partitions(run.out, [*held_out, *inputs])
    tasks = index_tasks(texts, args.decontaminate_ngram, run.out / WORK / "tasks") if texts else None
    sign = SignSettings(
        reading,
        scheme,
        num_partitions,
        tasks,
        args.decontaminate_action == "remove",
        frozenset(part.name for part in held_out),
    )
    ending = Report("dedup", run)
    done = _phases(run, held_out, inputs, sign, args)
    if isinstance(done, Finished):
        return ending.waiting(done, "a phase")
    manifest = _finish(run, recorded, sign, len(held_out), *done)
    return ending.finished(manifest, *_lines(manifest, run.out))


def _plan(args: argparse.Namespace) -> tuple[list[FilePart], list[FilePart]]:
    """Return the held-out parts and the parts of the inputs; no file is in both, and all names differ."""
    find_files([*args.held_out, *args.inputs], FORMATS)  # fails if a file is named twice
    report_left_out([*args.held_out, *args.inputs], FORMATS)
    cut = args.documents != "file"
    held_out, inputs = (
        plan_parts(find_files(paths, FORMATS), args.part_bytes, cut_text=cut) for paths in (args.held_out, args.inputs)
    )
    names = {part.name for part in inputs}
    return [replace(part, name=unique_name(f"held-out+{part.name}", names)) for part in held_out], inputs


def _num_partitions(out: Path, parts: Sequence[FilePart]) -> int:
    """Return the number of an earlier run in this folder, whose rows are kept if inputs change, or one by size."""
    record = out / WORK / "num_partitions"
    if record.is_file():
        kept = record.read_text(errors="replace").strip()
        if not (kept.isdecimal() and len(kept) < 9 and 1 <= int(kept) <= MAX_PARTITIONS):
            raise UserError(f"{record} is damaged: it holds {kept!r:.40}, not a number of partitions: remove it")
        return int(kept)
    size = sum(part.num_bytes * (_EXPANSION if compression_of(part.path) else 1) for part in parts)
    number = min(1 + size // PARTITION_BYTES, MAX_PARTITIONS)
    write_bytes(record, f"{number}\n".encode())
    return number


def _settings(args: argparse.Namespace, scheme: Scheme | None) -> dict[str, Any]:
    near = {"threshold": args.threshold, **vars(scheme)} if scheme else {}
    tasks = {}
    if args.decontaminate:
        tasks = {
            "folder": str(args.decontaminate),
            "action": args.decontaminate_action,
            "splits": args.decontaminate_splits,
            "ngram": args.decontaminate_ngram,
        }
    return {
        **input_settings(args),
        "held_out": [str(path) for path in args.held_out],
        "near": near,
        "decontaminate": tasks,
        "compress": args.compress,
        "partitions": args.partitions,
    }


def _phases(
    run: StepRun, held_out: list[FilePart], inputs: list[FilePart], sign: SignSettings, args: argparse.Namespace
) -> tuple[Finished, Finished] | Finished:
    """Return the results of the first and the last phase, or the phase at which other shares are still at work."""
    parts = [*held_out, *inputs]
    phase = f"sign-{sign.tasks.digest[:8]}" if sign.tasks else "sign"
    signing = run_parts(run, phase, parts, partial(sign_part, settings=sign), (sign.num_partitions, WORDS))
    if signing.results is None:
        return signing
    bases = np.cumsum([0, *(result.facts["documents"] for result in signing.results)], dtype=np.int64)
    signed = Signed(run.out, [part.name for part in parts], bases, int(bases[len(held_out)]))
    outputs = [result.outputs for result in signing.results]
    digest = hashlib.sha256(json.dumps([outputs, len(held_out)]).encode()).hexdigest()[:8]
    suffix = COMPRESSIONS[args.compress]
    current = {output["name"] for rows in outputs for output in rows}
    current.update(name for part in inputs for name in outputs_of_part(part.name, suffix))
    partitions = partition_parts(run.out, sign.num_partitions)
    current.update(pairs_name(kind, part) for kind in ("exact", "near") for part in partitions)
    _forget_phases(run.out, [phase, *(f"{name}-{digest}" for name in ("exact", "near", "write"))], current)

    common = {"signed": signed, "num_partitions": sign.num_partitions}
    exact = run_parts(run, f"exact-{digest}", partitions, partial(exact_pairs, **common))
    if exact.results is None:
        return exact
    files = _pair_files(run.out, exact.results)
    first = first_of_each(signed.num_documents, files)
    folder = run.out / WORK
    decisions = Decisions(folder / "first.bin", folder / "kept.bin", first.dtype.name)
    write_bytes(decisions.exact, first.tobytes())
    if sign.scheme:
        write_bytes(folder / "unique.bin", (first == np.arange(len(first), dtype=first.dtype)).tobytes())
        limits = {"scheme": sign.scheme, "threshold": args.threshold, "unique": folder / "unique.bin"}
        work = partial(near_pairs, **common, **limits)
        near = run_parts(run, f"near-{digest}", partitions, work)
        if near.results is None:
            return near
        first = first_of_each(signed.num_documents, [*files, *_pair_files(run.out, near.results)])
    write_bytes(decisions.kept, first.tobytes())
    del first
    work = partial(
        write_part, reading=sign.reading, signed=signed, decisions=decisions, num_perm=args.num_perm, suffix=suffix
    )
    written = run_parts(run, f"write-{digest}", inputs, work, follows=phase)
    return written if written.results is None else (signing, written)


def _pair_files(out: Path, results: list[PartResult]) -> list[Path]:
    return [out / output["name"] for result in results for output in result.outputs if output["bytes"]]


def _forget_phases(out: Path, phases: list[str], current: set[str]) -> None:
    """Forget phases that worked on other documents, except for those of their outputs that are ``current``."""
    for folder in (out / STATE).iterdir():
        if not folder.is_dir() or folder.name in phases:
            continue
        forget(out, folder.glob("*.json"), current)
        shutil.rmtree(folder, ignore_errors=True)


def _finish(
    run: StepRun, recorded: dict[str, Any], sign: SignSettings, num_held_out: int, signing: Finished, written: Finished
) -> dict[str, Any]:
    """Collect the results of the parts, and write the manifest."""
    names = [result.outputs[0]["name"].removesuffix(".names") for result in signing.results]
    facts: dict[str, Any] = {REMOVED: _gather(run.out, REMOVED, [f"{name}.removed" for name in names[num_held_out:]])}
    facts["held_out"] = counts_of(signing.results[:num_held_out]).to_json()
    pairs: Counter[tuple[str, ...]] = Counter()
    for result in written.results:
        pairs.update({tuple(key): number for *key, number in result.facts["pairs"]})
    facts["pairs"] = [
        {"removed_from": source, "because_of": other, "kind": kind, "documents": number}
        for (source, other, kind), number in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    ]
    if sign.tasks:
        facts[CONTAMINATED] = _gather(run.out, CONTAMINATED, [f"{name}.hits" for name in names])
        facts["contamination"] = summary(sign.tasks, [result.facts["contamination"] for result in signing.results])
    defects = [defect for result in signing.results[:num_held_out] for defect in result.defects]
    results = [PartResult([], Counts(), defects)]
    results += [replace(result, outputs=result.outputs[:1]) for result in written.results]
    return write_manifest(run.out, "dedup", recorded, signing.inputs, results, facts, versions=run.versions)


def _gather(out: Path, name: str, files: list[str]) -> dict[str, Any]:
    with write_stream(out / name) as (stream, written):
        for file in files:
            with io.BufferedReader(NamedFile(out / file)) as lines:
                shutil.copyfileobj(lines, stream)
    row = written.row(out)
    return {"bytes": row["bytes"], "sha256": row["sha256"]}


def _lines(manifest: dict[str, Any], out: Path) -> list[str]:
    """Return lines for the terminal: duplicates by source, overlap with tasks, files that name each document."""
    lines: list[str] = []
    pairs = manifest["pairs"]
    if pairs:
        rows = [
            [one_line(row["removed_from"]), one_line(row["because_of"]), row["kind"], f"{row['documents']:,}"]
            for row in pairs
        ]
        lines += ["", aligned([["removed from", "because of", "kind", "documents"], *rows[:MAX_ROWS]]), ""]
        if len(rows) > MAX_ROWS:
            lines.append(f"and {len(rows) - MAX_ROWS} more pairs of sources, in manifest.json")
    if "contamination" in manifest:
        rows = [
            [
                row["task"],
                f"{row['documents']:,}",
                f"{row['ngrams']:,}",
                f"{row['records_found']:,} of {row['records']:,} ({row['records_found'] / row['records']:.2%})",
                f"{row['records_too_short']:,}",
            ]
            for row in manifest["contamination"]
        ]
        head = ["task", "documents", "n-grams", "records found", "too short to look for"]
        lines += ["", aligned([head, *rows]), ""]
        there = {row["task"].split("/")[0] for row in manifest["contamination"]}
        if missing := [name for name in READERS if name not in there]:
            lines.append(f"no file of {', '.join(missing)} in {manifest['settings']['decontaminate']['folder']}")
    if manifest["held_out"]["documents_in"]:
        held_out = manifest["held_out"]
        lost = "".join(f", {number:,} {reason}" for reason, number in held_out["dropped"].items())
        lines.append(f"held out: {held_out['kept']:,} documents{lost}")
    lines.append(f"removed documents, one a line: {out / REMOVED}")
    if CONTAMINATED in manifest:
        lines.append(f"documents that overlap with a task, one a line: {out / CONTAMINATED}")
    return lines
