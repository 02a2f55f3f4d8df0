"""One benchmark of the hot paths, compared with other people's code in the same run.

  python scripts/benchmark.py                     everything, on the CPU
  python scripts/benchmark.py --quick             less of it, in under three minutes
  python scripts/benchmark.py --only neighbour    instead: next to a program that keeps one core busy
  python scripts/benchmark.py --only mapping      instead: a model in a file of 3 GB
  python scripts/benchmark.py --device cuda --markdown docs/benchmark_h200.md

Peers that are not installed are named and left out: pip install -e '.[bench]'. Exit status: 0; targets that are missed
are marked, and --strict makes them an error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from smlp.launch.machine import SPIN_COUNT

# what the smlp command sets next to busy programs; torch reads it when it is imported
if any(word.endswith("neighbour") for word in sys.argv):
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))

import torch
from benchmarks import (
    assignment,
    decoding,
    experts,
    growth,
    images,
    int8,
    mapping,
    masked,
    memory,
    neighbour,
    peers,
    scoring,
    serving,
    spatial,
    startup,
    timing,
    updates,
)
from benchmarks.report import Row, as_json, as_markdown, as_text, machine
from benchmarks.settings import Settings

from smlp.cli.main import guarded
from smlp.cli.numbers import MOST_PROCESSES, whole
from smlp.costs.matmul_rate import matmul_rate
from smlp.errors import UserError
from smlp.fairseq_compat.startup import keep_freed_memory
from smlp.files import check_writable
from smlp.ops.fast_paths import reference_ops
from smlp.ops.onednn import faster_than_mkl

SECONDS_FOR_LIMIT = 2.0
SECTIONS = {
    "spatial": spatial,
    "assignment": assignment,
    "experts": experts,
    "updates": updates,
    "masked": masked,
    "images": images,
    "decoding": decoding,
    "scoring": scoring,
    "serving": serving,
    "int8": int8,
    "growth": growth,
    "memory": memory,
    "startup": startup,
    "mapping": mapping,
    "neighbour": neighbour,
}
ALONE = ("mapping", "neighbour")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a part; may be given again")
    parser.add_argument("--threads", **whole(1, MOST_PROCESSES), help="of the CPU (default: as torch finds them)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here, over what is there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the report here, over what is there")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args(arguments)
    for option, file in (("--json", options.json), ("--markdown", options.markdown)):
        if file is not None:
            check_writable(file, option)  # before 18 minutes of work
    if options.json and options.markdown and options.json.resolve() == options.markdown.resolve():
        raise UserError(f"--json and --markdown both name {options.json}: one would overwrite the other")
    return options


def main(options: argparse.Namespace) -> int:
    """Runs the parts, prints their rows as they come, and writes the reports."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no GPU")
    if options.threads:
        torch.set_num_threads(options.threads)
    settings, started = Settings(options.device, options.quick), time.monotonic()
    about = machine(options.device, torch.get_num_threads())
    if options.device == "cpu":
        about["freed memory"] = "kept, as in training" if keep_freed_memory() else "as the environment sets it"
    rate = matmul_rate(torch.device(options.device), settings.dtype, SECONDS_FOR_LIMIT)
    about["GFLOP/s of a matrix product"] = round(rate / 1e9)
    if options.device == "cpu" and faster_than_mkl():
        with reference_ops():
            by_torch = matmul_rate(torch.device("cpu"), settings.dtype, SECONDS_FOR_LIMIT)
        about["the same by MKL, torch's choice"] = round(by_torch / 1e9)
    about["GB/s of a copy"] = round(timing.copy_rate(options.device, settings.repeats) / 1e9, 1)
    print(", ".join(f"{name} {value}" for name, value in about.items() if value))
    print(f"{'':<58} {'against':<30} {'ours':>10} {'theirs':>10} {'':<3} {'ratio':>8}")
    rows: list[Row] = []
    for name in options.only or [name for name in SECTIONS if name not in ALONE]:
        section_started = time.monotonic()
        for row in SECTIONS[name].rows(settings):
            rows.append(row)
            print(as_text(row), flush=True)
        print(f"{name}: {time.monotonic() - section_started:.0f} s", flush=True)
        if options.json:  # after each part, in case a later one is stopped
            options.json.write_text(json.dumps(as_json(about, rows, peers.absent), indent=2) + "\n")
        if options.markdown:
            options.markdown.write_text(as_markdown(about, rows, peers.absent))
    for name, reason in peers.absent.items():
        print(f"not measured: {name}: {reason}")
    missed = [row for row in rows if row.holds is False]
    print(f"{len(rows)} rows in {time.monotonic() - started:.0f} s, {len(missed)} targets missed")
    return 1 if options.strict and missed else 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(parse())))
