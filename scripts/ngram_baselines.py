"""Perplexity of n-gram models on binarised data: what a network has to be better than.

  python scripts/ngram_baselines.py data/bin/shard00:data/bin/shard01 --orders 1 2 3 5

Trains interpolated modified Kneser-Ney models (smlp.text.ngram) on the tokens of train in all folders, and scores
valid or test of the first. All tokens are held in memory, and some 40 bytes for each different n-gram.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from smlp.cli.main import guarded
from smlp.errors import UserError
from smlp.evaluation.perplexity import Perplexity, TextSize
from smlp.evaluation.report import decoded_sizes
from smlp.text.binarized import read_fairseq_tokens
from smlp.text.ngram import NGramModel
from smlp.text.tokenizer import load_tokenizer
from smlp.text.tokenizer_files import DICTIONARY, Vocabulary

NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}


def baselines(folders: list[Path], subset: str, orders: list[int]) -> list[tuple[str, Perplexity]]:
    """Return the name and perplexity of each order, on a subset of the first folder.

    Raises:
        UserError: a file is missing or damaged, or the folders have different dictionaries.
    """
    tokenizer = load_tokenizer(folders[0])
    vocab_size = len(tokenizer.vocabulary)
    for folder in folders[1:]:
        if Vocabulary.load(folder / DICTIONARY).symbols != tokenizer.vocabulary.symbols:
            raise UserError(f"{folder} has another dictionary than {folders[0]}: their ids mean other words")
    train = np.concatenate([read_fairseq_tokens(folder / "train").tokens for folder in folders])
    scored = read_fairseq_tokens(folders[0] / subset)
    sizes = decoded_sizes(scored, tokenizer)
    text = TextSize(int(sizes.words_N.sum()), len(scored.lengths), int(sizes.bytes_N.sum()))
    rows = []
    for order in orders:
        log_probs = NGramModel.fit(train, order, vocab_size).log_probs(scored.tokens)
        rows.append((NAMES.get(order, f"{order}-gram"), Perplexity.of(log_probs, text)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of binarised data, or several with colons between them")
    parser.add_argument("--subset", choices=("valid", "test"), default="test")
    parser.add_argument("--orders", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    options = parser.parse_args()
    if min(options.orders) < 1:
        raise UserError(f"--orders must be at least 1, not {min(options.orders)}")
    rows = baselines([Path(folder) for folder in options.data.split(":")], options.subset, options.orders)
    text = rows[0][1].text
    print(f"{options.subset}: {rows[0][1].num_tokens:,} tokens, {text.num_words:,} words, {text.num_bytes:,} bytes")
    print("| model | perplexity per token | per word | bits per byte |\n|---|---:|---:|---:|")
    for name, row in rows:
        per_word = "-" if row.per_word is None else f"{row.per_word:,.1f}"  # as of a text without words
        per_byte = "-" if row.bits_per_byte is None else f"{row.bits_per_byte:.3f}"
        print(f"| {name} | {row.per_token:,.1f} | {per_word} | {per_byte} |")


if __name__ == "__main__":
    sys.exit(guarded(main))
