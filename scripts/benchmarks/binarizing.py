"""``smlp data binarize`` against fairseq-preprocess on the same SentencePiece text: tokens per second.

  python scripts/benchmarks/binarizing.py TEXT.txt [--lines 40000] [--vocab-size 8000] [--workers 1 2]

Trains a model on the first 10,000 lines of the text, then times whole commands: lines of pieces to .bin, and raw text
to .bin, the other side with the text cut into pieces before (sentencepiece in as many processes). Compares the bytes.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from data_prep.tokenize.models import pieces_of, train_sentencepiece
from smlp.cli.main import guarded
from smlp.errors import UserError
from smlp.text.binarized import read_fairseq_tokens

TRAINING_LINES = 10_000
TARGET = 5.0  # times as fast with two workers


def main() -> int:
    """Print a table; return the exit status, 1 if the bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="UTF-8, a paragraph a line")
    parser.add_argument("--lines", type=int, default=40_000, help="of the text that are timed (default: 40000)")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    if min(options.workers) < 1:
        raise UserError(f"--workers must be at least 1, got {min(options.workers)}")
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), options)


def measure(folder: Path, options: argparse.Namespace) -> int:
    """Time all commands in a folder; return the exit status."""
    lines = options.text.read_text(encoding="utf-8", errors="replace").split("\n")[: options.lines]
    raw, pieces, tokenizer = folder / "raw.txt", folder / "pieces.spm", folder / "tokenizer"
    raw.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer.mkdir()
    model = train_sentencepiece(lines[:TRAINING_LINES], options.vocab_size)
    (tokenizer / "sentencepiece.model").write_bytes(model)
    (tokenizer / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces_of(model)), encoding="utf-8")
    print(f"{'':<34}{'workers':>8}{'seconds':>9}{'tokens/s':>12}")
    same = True
    for workers in options.workers:
        cutting = cut(raw, pieces, tokenizer, workers)
        theirs = run_fairseq(pieces, tokenizer, folder / f"fairseq{workers}", workers)
        tokens = len(read_fairseq_tokens(folder / f"fairseq{workers}" / "train").tokens)
        ours = {}
        for form, text in (("pieces", pieces), ("lines", raw)):
            out = folder / f"{form}{workers}"
            ours[form] = run_ours(text, form, tokenizer, out, workers)
            for suffix in ("bin", "idx"):
                name = f"train.{suffix}"
                same &= filecmp.cmp(out / name, folder / f"fairseq{workers}" / name, shallow=False)
        rows = [
            ("pieces, fairseq-preprocess", theirs),
            ("pieces, smlp data binarize", ours["pieces"]),
            ("raw text, cut + fairseq-preprocess", cutting + theirs),
            ("raw text, smlp data binarize", ours["lines"]),
        ]
        for name, seconds in rows:
            print(f"{name:<34}{workers:>8}{seconds:>9.1f}{tokens / seconds:>12,.0f}", flush=True)
        ratios = theirs / ours["pieces"], (cutting + theirs) / ours["lines"]
        print(f"times as fast: pieces {ratios[0]:.1f}, raw text {ratios[1]:.1f} (target with 2 workers: {TARGET:g})")
    print("the bytes are " + ("the same" if same else "NOT the same"))
    return 0 if same else 1


def cut(raw: Path, pieces: Path, tokenizer: Path, workers: int) -> float:
    """Write a text's pieces as spm_encode does, its lines shared out among processes; return the seconds."""
    start = time.perf_counter()
    lines = raw.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    size = -(-len(lines) // workers)
    shares = [lines[first : first + size] for first in range(0, len(lines), size)]
    with ProcessPoolExecutor(workers) as pool:
        texts = list(pool.map(_pieces, shares, [str(tokenizer / "sentencepiece.model")] * len(shares)))
    pieces.write_text("".join(texts), encoding="utf-8")
    return time.perf_counter() - start


def _pieces(lines: list[str], model: str) -> str:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    return "".join(" ".join(line) + "\n" for line in processor.encode(lines, out_type=str, num_threads=1))


def run_fairseq(pieces: Path, tokenizer: Path, out: Path, workers: int) -> float:
    """Return the seconds of the whole command."""
    command = [sys.executable, "-m", "fairseq_cli.preprocess", "--only-source", "--workers", str(workers)]
    command += ["--srcdict", str(tokenizer / "dict.txt"), "--trainpref", str(pieces), "--destdir", str(out)]
    return _seconds(command)


def run_ours(text: Path, form: str, tokenizer: Path, out: Path, workers: int) -> float:
    """Return the seconds of the whole command; every worker gets a part."""
    part_bytes = -(-text.stat().st_size // workers)
    command = [sys.executable, "-m", "smlp", "data", "binarize", "--format", form, "--train", str(text), "--quiet"]
    command += ["--tokenizer", str(tokenizer), "--out", str(out), "--workers", str(workers)]
    return _seconds([*command, "--part-bytes", str(part_bytes)])


def _seconds(command: list[str]) -> float:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[2:5]} ended with {done.returncode}: {done.stderr[-500:]}")
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(guarded(main))
