"""``smlp export``: a trained model for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from smlp.cli.options import add_tokenizer_option
from smlp.errors import UserError

DESCRIPTION = "write a checkpoint for other programs"
EPILOG = """examples:
  smlp export checkpoints/checkpoint_best.pt exported --hf
  smlp checkpoint import exported -o checkpoint.pt

AutoModelForCausalLM (AutoModelForMaskedLM for an encoder) and AutoTokenizer read the folder, after 'import smlp.hf' or
with trust_remote_code=True. It has config.json, model.safetensors (in parts if it is large), tokenizer.json,
generation_config.json, a model card (README.md), the dictionary and the tokenizer's own files. The second command makes
a checkpoint of it again. Needs the extra hf (pip install -e '.[hf]').
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("path", metavar="CHECKPOINT", help="checkpoint in one file or in parts, or an export")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument("--hf", action="store_true", required=True, help="for Hugging Face transformers")
    parser.add_argument("--dict", help="dict.txt, if it is not found automatically")
    add_tokenizer_option(parser)
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a file of weights (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the folder and list its files."""
    from smlp.checkpoint.inspection import open_intact

    try:
        from smlp.hf.export import write_folder
    except ImportError as error:
        raise UserError(f"smlp export --hf needs the extra hf, pip install -e '.[hf]' ({error})") from None
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    left_out = write_folder(open_intact(args.path), args.folder, args.dict, args.tokenizer, args.max_shard_size)
    print(f"wrote {args.folder}: {', '.join(sorted(path.name for path in args.folder.iterdir()))}")
    if left_out:
        print(f"left out, because a masked language model has no other heads: {', '.join(left_out)}")
    return 0
