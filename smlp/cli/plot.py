"""``smlp plot``: pictures of trained models."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smlp.cli.numbers import whole
from smlp.cli.options import add_model_files, load_model
from smlp.errors import UserError

if TYPE_CHECKING:
    from smlp.evaluation.samples import Samples
    from smlp.inference.language_model import LanguageModel
    from smlp.plots.weights import WeightPlots

DESCRIPTION = "pictures of trained models: spatial filters, which tokens and features go to which expert"
EPILOG = """examples:
  smlp plot weights checkpoints/checkpoint_best.pt --out pictures
  smlp plot weights checkpoints/checkpoint_best.pt --out pictures --data data-bin --subset valid --json weights.json
  smlp plot weights checkpoints/checkpoint_best.pt --layers 3,6 --experts all --format svg

Drawing needs matplotlib: pip install "smlp[plots]". What each picture and number means: docs/plots.md.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands with their options."""
    raw = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    about = "what a checkpoint has learnt: spatial filters and how Toeplitz-like they are; with --data, what goes where"
    weights = actions.add_parser("weights", help=about, description=about, epilog=EPILOG, formatter_class=raw)
    weights.add_argument("path", metavar="CKPT", help="checkpoint, in one file or in parts, or an export")
    add_model_files(weights)
    weights.add_argument("--out", metavar="DIR", default="plots", help="folder for the pictures (default: %(default)s)")
    weights.add_argument(
        "--format", choices=("png", "svg"), default="png", help="file format of the pictures (default: png)"
    )
    weights.add_argument(
        "--layers", metavar="LIST", help="such as 0,3,6, or all (default: 4 of each kind, spread evenly over the depth)"
    )
    weights.add_argument(
        "--experts", metavar="LIST", help="heads or experts whose matrices are drawn (default: 8, spread evenly)"
    )
    weights.add_argument("--data", metavar="DATA", help="binarised text (mmap format) whose tokens are followed")
    weights.add_argument(
        "--subset", metavar="NAME", dest="gen_subset", default="valid", help="split of DATA (default: %(default)s)"
    )
    weights.add_argument(
        "--limit-tokens",
        **whole(),
        metavar="N",
        default=2**16,
        help="only the first sequences, until they hold so many tokens (default: %(default)s)",
    )
    weights.add_argument(
        "--pieces", **whole(), metavar="P", default=40, help="most frequent pieces in a map (default: %(default)s)"
    )
    weights.add_argument("--json", metavar="FILE", help="also write all numbers here")
    weights.set_defaults(text=None)


def run(args: argparse.Namespace) -> int:
    """Draw, and print the numbers and where the pictures are."""
    from smlp.checkpoint.opened import open_checkpoint
    from smlp.cli.eval_data import load_model_for, read_text
    from smlp.cli.json_file import check_outputs, remove_outputs, write_json
    from smlp.launch.team import Team
    from smlp.plots.drawing import check_matplotlib
    from smlp.plots.weights import Choice, plot_weights

    check_matplotlib()
    choice = Choice(_numbers("layers", args.layers), _numbers("experts", args.experts))
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise UserError(f"--out {args.out} is a file: name a folder for the pictures")
    check_outputs(json=args.json)
    model = load_model(args) if args.data is None else load_model_for(args, Team())
    samples = text_name = None
    if args.data is not None:
        text = read_text(args, model)
        samples, text_name = _samples(args, model, text.stream), Path(text.name).name
    arch = open_checkpoint(args.path).arch
    remove_outputs(args.json)
    plots = plot_weights(
        model.decoder,
        Path(args.out),
        f"{arch}, T = {model.decoder.config.max_tokens}",
        choice=choice,
        file_format=args.format,
        samples=samples,
        symbols=_labels(model),
        text=text_name or "",
        num_pieces=args.pieces,
    )
    if args.json:
        about = {"checkpoint": args.path, "arch": arch, "data": args.data, "subset": text_name}
        write_json(args.json, {**about, **plots.as_json()})
    _print(arch, plots)
    return 0


def _labels(model: LanguageModel) -> list[str]:
    """Return the labels of pieces in a picture: their text, if the dictionary has numbers (byte-level BPE)."""
    from smlp.text.tokenizer_files import SPECIAL_SYMBOLS
    from smlp.text.tokenizer_kinds import WORD_START

    symbols = list(model.vocabulary.symbols)
    for token in range(len(SPECIAL_SYMBOLS), len(symbols)):
        if symbols[token].isdecimal():
            text = model.tokenizer.content(token).decode("utf-8", "replace")
            if text.strip() != symbols[token]:
                symbols[token] = text.replace(" ", WORD_START).replace("\n", "\\n")
    return symbols


def _numbers(option: str, words: str | None) -> list[int] | str | None:
    if words is None or words == "all":
        return words
    numbers = [word.strip() for word in words.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise UserError(f"--{option} takes numbers with commas between them, such as 0,3,6, or all; got {words!r}")
    return [int(number) for number in numbers]


def _samples(args: argparse.Namespace, model: LanguageModel, stream: Any) -> Samples:
    from smlp.evaluation.samples import Cutting, cut
    from smlp.text.tokenizer import Vocabulary

    config = model.decoder.config
    size = config.max_tokens - int(model.start_token != Vocabulary.eos)
    cutting = Cutting(config.max_tokens, size, prefix=config.prefix_tokens, start_token=model.start_token)
    return cut(stream.tokens, stream.lengths, cutting).up_to(args.limit_tokens)


def _print(arch: str, plots: WeightPlots) -> None:
    if plots.layers:
        _print_filters(arch, plots)
    if plots.routing is not None:
        _print_routing(plots)
    for sentence in plots.left_out:
        print(f"left out: {sentence}")
    print(f"in {plots.figures[0].parent}:")
    for path in plots.figures:
        print(f"  {path.name}")


def _print_filters(arch: str, plots: WeightPlots) -> None:
    from smlp.plots.filters import random_toeplitz_share

    print(f"spatial filters of {arch}; Toeplitz share of the energy, least, mean and most of a layer's matrices")
    head = ("least", "mean", "most", "random", "half within", "rms weight")
    print(f"{'layer':<7}{'kind':<23}{'matrices':>8}{'T':>6}" + "".join(f"{name:>13}" for name in head))
    for layer in plots.layers:
        numbers = plots.filters[layer.layer]
        shares = [each.toeplitz_share for each in numbers if each.toeplitz_share is not None]
        reach = [each.half_energy_distance for each in numbers if each.half_energy_distance is not None]
        cells = ["-"] * 3 if not shares else [f"{f(shares):.4f}" for f in (min, statistics.mean, max)]
        cells.append(f"{random_toeplitz_share(layer.size)[0]:.4f}")
        cells.append(f"{statistics.mean(reach):.0f} tokens" if reach else "-")
        cells.append(f"{math.sqrt(statistics.mean(each.weight_rms**2 for each in numbers)):.4g}")
        print(
            f"{layer.layer:<7}{layer.kind:<23}{layer.num_matrices:>8}{layer.size:>6}"
            + "".join(f"{cell:>13}" for cell in cells)
        )


def _print_routing(plots: WeightPlots) -> None:
    routing = plots.routing
    print(
        f"{routing.num_tokens:,} tokens in {routing.num_seqs:,} sequences; {len(routing.pieces_P)} pieces counted apart"
    )
    print(
        f"{'layer':<23}{'router':<9}{'experts':>8}{'least load':>12}{'most load':>11}{'loyalty':>9}{'own affinity':>14}"
    )
    for counts in routing.tokens:
        load, own = counts.load_share_E, counts.own_affinity_E
        affinity = "-" if own is None else f"{own.sum() / max(int(counts.load_E.sum()), 1):.4f}"
        print(
            f"{counts.name:<23}{counts.router:<9}{len(load):>8}{load.min():>12.2%}{load.max():>11.2%}"
            f"{counts.loyalty:>9.2%}{affinity:>14}"
        )
    for counts in routing.features:
        experts, agreement = counts.counts_HE.shape[1], counts.agreement_H.mean()
        if counts.num_seqs < 2:
            print(f"{counts.name}: one sequence, so that none sends its features where another does")
            continue
        print(
            f"{counts.name}: two sequences send a feature to the same of {experts} experts {agreement:.2%} of the "
            f"time, at random {1 / experts:.2%}"
        )
