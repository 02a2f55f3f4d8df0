"""Options that several commands share: the model, the ranks that share the work, how candidates are scored."""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from smlp.cli.numbers import whole
from smlp.config.settings import DTYPES
from smlp.errors import UserError
from smlp.launch.team import Team, team_at

if TYPE_CHECKING:
    import torch

    from smlp.config import ModelConfig
    from smlp.inference.language_model import LanguageModel
    from smlp.inference.masked import MaskedLanguageModel
    from smlp.launch.ranks import Place
    from smlp.parallel import Ranks


def refuse_unused(
    args: argparse.Namespace,
    declare: Callable[[argparse.ArgumentParser], None],
    sentence: str,
    groups: Iterable[tuple[str, object, Sequence[str]]],
) -> None:
    """Refuse options that differ from their defaults and would not be used.

    Args:
        args: the options as they were read.
        declare: declares the options, with their defaults.
        sentence: the message, with ``{option}`` and ``{companion}``.
        groups: for each thing that options need: its name in the message, whether it is there, and the names in
            ``args`` of the options that need it.

    Raises:
        UserError: the message names the option and what it needs.
    """
    parser = argparse.ArgumentParser(add_help=False)
    declare(parser)
    for companion, is_there, options in groups:
        for option in options:
            if not is_there and getattr(args, option) != parser.get_default(option):
                raise UserError(sentence.format(option=f"--{option.replace('_', '-')}", companion=companion))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--path`` and ``--dtype``, and what :func:`add_model_files` adds."""
    parser.add_argument("--path", required=True, help="checkpoint, in one file or in parts, or an export")
    add_model_files(parser)
    add_dtype_option(parser)


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype``."""
    parser.add_argument(
        "--dtype",
        choices=(*DTYPES, "int8"),
        default="fp32",
        help="precision of weights and products; int8 on a CPU, with scales for each token (default: %(default)s)",
    )


def add_model_files(parser: argparse.ArgumentParser) -> None:
    """Add ``--dict``, ``--tokenizer`` and ``--device``, for commands that name the checkpoint in another way."""
    parser.add_argument("--dict", help="dict.txt, if it is not found automatically")
    add_tokenizer_option(parser)
    parser.add_argument("--device", help="torch device (default: a GPU where there is one)")


def add_tokenizer_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--tokenizer``."""
    parser.add_argument(
        *("--tokenizer", "--sentencepiece-model"),
        metavar="FILE",
        help="SentencePiece model, or encoder.json with vocab.bpe next to it, if it is not found automatically",
    )


def load_model(args: argparse.Namespace, team: Team | None = None, mapped: bool = True) -> LanguageModel:
    """Load the language model that the options name, in evaluation mode, on its device and in its precision.

    Args:
        args: of the command line.
        team: ranks that share the work.
        mapped: whether weights stay in the file, which must then not be written to while the model is used.

    Raises:
        UserError: a file is missing or damaged, the model is an encoder, or the device does not exist or has no int8.
    """
    import torch

    from smlp.checkpoint.load import load_language_model

    device = (team or Team()).device(args.device)
    if args.dtype == "int8" and device.type != "cpu":
        raise UserError(f"--dtype int8 is for CPUs, and the device is {device}: give --device cpu, or --dtype bf16")
    ranks_for = None
    if getattr(args, "spread_experts", False):
        ranks_for = functools.partial(_spread_over, args.path, (team or Team()).size, device)
    what = f"smlp {args.command}"
    model = load_language_model(args.path, args.dict, args.tokenizer, mapped, what, ranks_for)
    if args.dtype == "int8":
        from smlp.inference.int8 import quantize

        quantize(model)
        return model
    return model.to(device, getattr(torch, DTYPES[args.dtype]))


def _spread_over(path: str, num_ranks: int, device: torch.device, config: ModelConfig) -> Ranks:
    """Return which rank holds which experts of a model.

    Raises:
        UserError: each rank would hold all of them.
    """
    from smlp.parallel import connect

    if not config.num_sparse_layers:
        raise UserError(f"--spread-experts: {path} has no experts")
    if math.gcd(num_ranks, config.num_experts) == 1:
        raise UserError(
            f"--spread-experts: {num_ranks} rank{'s' * (num_ranks > 1)} and the {config.num_experts} experts of {path} "
            "have no common divisor: choose another --nproc"
        )
    return connect(config.num_experts, backend="nccl" if device.type == "cuda" else None)


def load_any_model(args: argparse.Namespace, team: Team | None = None) -> LanguageModel | MaskedLanguageModel:
    """Load the language model or encoder that the options name, as :func:`load_model` does."""
    from smlp.checkpoint.load import load_pretrained

    device = (team or Team()).device(args.device)
    return load_pretrained(args.path, args.dict, args.tokenizer, mapped=True).to(device)


def add_team_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--nproc``; the command also needs ``--device``."""
    parser.add_argument(
        "--nproc",
        **whole(),
        metavar="N",
        help="divide the work among N processes on this machine, each with the whole model",
    )


def add_spread_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--spread-experts``, which :func:`load_model` reads."""
    parser.add_argument(
        "--spread-experts",
        action="store_true",
        help="divide the experts among the processes too, for models that do not fit into each",
    )


def refuse_other_ranks(nproc: int | None, place: Place) -> None:
    """Refuse a ``--nproc`` that contradicts the launcher.

    Raises:
        UserError: the message names both numbers.
    """
    if nproc not in (None, place.world_size):
        raise UserError(f"--nproc {nproc}, but {place.launcher} started {place.world_size} ranks already: leave it out")


def as_team(args: argparse.Namespace, work: Callable[[Team], int]) -> int:
    """Do the work here, on the ranks that ``--nproc`` asks for, or as one of the ranks that a launcher started.

    Args:
        args: of the command, with ``nproc``, ``device`` and ``words``, the command line itself.
        work: what each rank does; returns the exit status.

    Raises:
        UserError: ``--nproc`` contradicts the launcher.
    """
    from smlp.launch.ranks import has_terminal, place_of

    place = place_of(os.environ, is_interactive=has_terminal())
    if place is None and args.nproc not in (None, 1):
        from smlp.launch.local import run_ranks, this_program

        return run_ranks([*this_program(), *args.words], args.nproc)
    if place is not None:
        refuse_other_ranks(args.nproc, place)
    with team_at(place, args.device) as team:
        return work(team)


def add_scoring_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--newline``, ``--fill-prefix``, ``--batch-tokens`` and ``--skip-too-long``."""
    from smlp.text.tokenizer import NEWLINES

    parser.add_argument(
        "--newline", choices=NEWLINES, default="eos", help="what a line break becomes (default: </s>, as in training)"
    )
    parser.add_argument(
        "--fill-prefix",
        action="store_true",
        help="sMLP-partial: put start symbols before prompts shorter than its prefix",
    )
    parser.add_argument(
        "--batch-tokens", **whole(), default=8192, metavar="N", help="positions in a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--skip-too-long", action="store_true", help="skip, and count, records that do not fit into the context"
    )
