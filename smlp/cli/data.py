"""``smlp data``: from raw corpora to the sharded data that ``fairseq-train`` reads. The steps are in ``data_prep``."""

from __future__ import annotations

import argparse
import importlib

DESCRIPTION = "turn raw corpora into sharded training data"
EPILOG = """examples:
  smlp data fetch wikipedia openwebtext --out corpora
  smlp data clean --in corpora/ --out data/clean
  smlp data dedup --in data/clean --out data/unique
  smlp data sample --in data/unique --out data/sample --fraction 0.1
  smlp data tokenizer --in data/sample/train --out data/tokenizer --vocab-size 32000
  smlp data binarize --in data/sample --tokenizer data/tokenizer --out data/bin --shards 8
  smlp data inspect data/bin

Every step reads and writes plain files, works in parallel (--workers), resumes if it is run again, and writes a
manifest.json. 'smlp data STEP --help' shows the options of each.
"""

# name: (module, summary). A module has DESCRIPTION, EPILOG, add_options(parser) and run(args) -> exit status.
STEPS: dict[str, tuple[str, str]] = {
    "fetch": ("data_prep.fetch.command", "download corpora, and turn them into documents"),
    "clean": (
        "data_prep.clean.command",
        "clean documents by rules: characters, boilerplate, language, length, repetition",
    ),
    "dedup": (
        "data_prep.dedup.command",
        "remove exact and near duplicates and held-out documents; find overlap with zero-shot tasks",
    ),
    "sample": ("data_prep.sample.command", "sample documents, mix sources, split into train, valid, test"),
    "tokenizer": (
        "data_prep.tokenize.command",
        "make a SentencePiece model or byte-level BPE, and its dictionary",
    ),
    "binarize": ("data_prep.binarize.command", "encode text as fairseq's binary shards"),
    "glue": ("data_prep.finetuning.glue", "prepare GLUE's tasks, or sentences of your own, for fine-tuning"),
    "squad": ("data_prep.finetuning.squad", "prepare question answering in SQuAD's JSON for fine-tuning"),
    "inspect": ("data_prep.inspecting.command", "show what binary data contain, and verify them"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands with their options."""
    raw = argparse.RawDescriptionHelpFormatter
    steps = parser.add_subparsers(dest="step", required=True, metavar="STEP")
    for name, (module_name, text) in STEPS.items():
        module = importlib.import_module(module_name)
        step = steps.add_parser(
            name, help=text, description=module.DESCRIPTION, epilog=module.EPILOG, formatter_class=raw
        )
        module.add_options(step)
        step.set_defaults(run_step=module.run)


def run(args: argparse.Namespace) -> int:
    """Run one step."""
    return args.run_step(args)
