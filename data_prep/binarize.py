"""Pieces into fairseq's binary data: ``python -m data_prep.binarize --in DIR --out DIR``.

Runs fairseq's own preprocess tool on what :mod:`data_prep.tokenizer` wrote and puts ``sentencepiece.model`` beside its
output, so that the data folder alone is enough to train on and to turn text into tokens and back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from data_prep.command import run
from data_prep.corpus import SPLITS
from data_prep.tokenizer import MODEL_NAME
from smlp.errors import UserError


def binarize(pieces: Path, destination: Path, log: Path) -> None:
    """``pieces/*.spm`` to ``destination/{train,valid,test}.{bin,idx}`` and ``dict.txt``; the tool's output to ``log``.

    Works in a temporary folder and moves the files when all are there, so a failure leaves nothing half-written.
    Raises UserError naming the step and the log if an input is missing or the tool fails.
    """
    inputs = [pieces / f"{name}.spm" for name in SPLITS] + [pieces / MODEL_NAME]
    missing = [str(path) for path in inputs if not path.is_file()]
    if missing:
        raise UserError(f"binarising: {', '.join(missing)} missing: run the tokenizer step first")
    log.parent.mkdir(parents=True, exist_ok=True)
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".binarize-", dir=destination) as folder:
        command = [sys.executable, "-m", "fairseq_cli.preprocess", "--only-source", "--destdir", folder]
        for name in SPLITS:
            command += [f"--{name}pref", str(pieces / f"{name}.spm")]
        with log.open("wb") as output:
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        produced = [Path(folder) / f"{name}.{kind}" for name in SPLITS for kind in ("bin", "idx")]
        produced.append(Path(folder) / "dict.txt")
        if status != 0 or not all(path.is_file() for path in produced):
            raise UserError(
                f"binarising with fairseq-preprocess failed with exit status {status}; its output is in {log}"
            )
        for path in produced:
            os.replace(path, destination / path.name)
        shutil.copyfile(pieces / MODEL_NAME, Path(folder) / MODEL_NAME)
        os.replace(Path(folder) / MODEL_NAME, destination / MODEL_NAME)  # last: its presence says that all are there


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.binarize",
        description="Binarise tokenised splits with fairseq-preprocess.",
        epilog="example: python -m data_prep.binarize --in data/mine-spm --out data/mine-bin",
    )
    parser.add_argument("--in", dest="pieces", type=Path, required=True, metavar="DIR", help="*.spm and the model")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to train on")
    parser.add_argument("--log", type=Path, metavar="FILE", help="the tool's output (default: OUT/preprocess.out)")
    options = parser.parse_args(arguments)
    log = options.log or options.out / "preprocess.out"
    binarize(options.pieces, options.out, log)
    print(f"wrote {options.out}: train, valid and test, dict.txt and {MODEL_NAME}; log in {log}")


if __name__ == "__main__":
    raise SystemExit(run(main))
