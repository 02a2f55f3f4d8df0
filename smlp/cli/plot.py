"""``smlp plot``: pictures of trained models."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from smlp.cli.numbers import whole
from smlp.cli.options import add_model_files, load_any_model
from smlp.errors import UserError
from smlp.files import check_folder

if TYPE_CHECKING:
    from smlp.evaluation.samples import Samples
    from smlp.inference.language_model import LanguageModel
    from smlp.inference.masked import MaskedLanguageModel
    from smlp.plots.attention import AttentionMap, SeenText
    from smlp.plots.weights import WeightPlots
    from smlp.text.binarized import BinarizedTokens

DESCRIPTION = (
    "pictures of trained models: spatial filters, tiny attention, which tokens and features go to which expert"
)
EPILOG = """examples:
  smlp plot weights checkpoints/checkpoint_best.pt --out pictures
  smlp plot weights checkpoints/checkpoint_best.pt --out pictures --data data-bin --subset valid --json weights.json
  smlp plot weights checkpoints/checkpoint_best.pt --layers 3,6 --experts all --format svg
  smlp plot weights amlp/checkpoint_best.pt --text "A man is asleep. ||| Nobody sleeps." --text "The sun rises."

Drawing needs matplotlib: pip install -e ".[plots]". docs/plots.md explains each picture and number.
"""

#: stands between two texts that are read together
SEPARATOR = "|||"
#: number of lines of data whose attention is drawn, and the most tokens of one, for a readable picture
MOST_TEXTS, _MOST_TOKENS = 4, 64
#: default number of tokens of data that are followed
_LIMIT_TOKENS = 2**16
#: default number of pieces in a map
_PIECES = 40


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands with their options."""
    raw = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    about = "what a checkpoint has learnt: spatial filters and how Toeplitz-like they are; with text, what goes where"
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
    weights.add_argument("--subset", metavar="NAME", dest="gen_subset", help="split of DATA (default: valid)")
    weights.add_argument(
        "--limit-tokens",
        **whole(),
        metavar="N",
        help=f"use only the first sequences, until they hold N tokens (default: {_LIMIT_TOKENS})",
    )
    weights.add_argument("--pieces", **whole(), metavar="P", help=f"most frequent pieces in a map (default: {_PIECES})")
    weights.add_argument(
        "--text",
        action="append",
        default=[],
        dest="sentences",
        metavar="TEXT",
        help=f"aMLP: draw which of its tokens the tiny attention connects; {SEPARATOR} between two texts that are read "
        f"together; may be repeated (default: the first {MOST_TEXTS} lines of DATA)",
    )
    weights.add_argument("--json", metavar="FILE", help="also write all numbers here")
    weights.set_defaults(text=None)


def run(args: argparse.Namespace) -> int:
    """Draw, and print the numbers and the paths of the pictures."""
    from smlp.checkpoint.opened import open_checkpoint
    from smlp.cli.eval_data import load_model_for, read_text
    from smlp.cli.json_file import check_outputs, remove_outputs, write_json
    from smlp.inference.masked import MaskedLanguageModel
    from smlp.launch.team import Team
    from smlp.plots.attention import tiny_attention
    from smlp.plots.drawing import check_matplotlib
    from smlp.plots.weights import Choice, check_drawable, plot_weights

    check_matplotlib()
    choice = Choice(_numbers("layers", args.layers), _numbers("experts", args.experts))
    check_folder(args.out, "--out", "the pictures")
    is_beside = args.json is not None and Path(args.json).resolve().parent == Path(args.out).resolve()
    if not is_beside or Path(args.out).exists():  # otherwise the folder is made with the pictures
        check_outputs(json=args.json)
    of_text = {"--subset": args.gen_subset, "--limit-tokens": args.limit_tokens, "--pieces": args.pieces}
    for option, value in of_text.items():
        if value is not None and args.data is None:
            raise UserError(
                f"{option} {value} would not be used: it chooses from the text of --data, which is not given"
            )
    args.gen_subset = "valid" if args.gen_subset is None else args.gen_subset
    args.pieces = _PIECES if args.pieces is None else args.pieces
    args.limit_tokens = _LIMIT_TOKENS if args.limit_tokens is None else args.limit_tokens
    model = load_any_model(args) if args.data is None else load_model_for(args, Team(), load_any_model)
    samples = text_name = None
    texts = [_as_text(sentence, model) for sentence in args.sentences]
    if args.data is not None:
        routes_text = not isinstance(model, MaskedLanguageModel) and model.core.config.num_sparse_layers > 0
        for option in () if routes_text else ("--limit-tokens", "--pieces"):
            if of_text[option] is not None:
                raise UserError(
                    f"{option} {of_text[option]} would not be used: it is for the text that a decoder with experts "
                    "routes"
                )
        text = read_text(args, model)
        text_name = Path(text.name).name
        samples = None if isinstance(model, MaskedLanguageModel) else _samples(args, model, text.stream)
        if not texts and tiny_attention(model.core):
            texts = _first_lines(model, text.stream, text_name)
    arch = open_checkpoint(args.path).arch
    check_drawable(model.core, choice, samples is not None, bool(texts))
    remove_outputs(args.json)
    plots = plot_weights(
        model.core,
        Path(args.out),
        f"{arch}, T = {model.core.config.max_tokens}",
        choice=choice,
        file_format=args.format,
        samples=samples,
        texts=texts,
        symbols=_labels(model),
        text=text_name or "",
        num_pieces=args.pieces,
    )
    if args.sentences and args.data is not None and not model.core.config.num_sparse_layers:
        plots.left_out.append("--data: the model has no experts among which tokens could choose, and --text is drawn")
    about = {"checkpoint": args.path, "arch": arch, "data": args.data, "subset": text_name}
    write_json(args.json, {**about, **plots.as_json()})
    _print(arch, plots)
    return 0


def _as_text(sentence: str, model: LanguageModel | MaskedLanguageModel) -> SeenText:
    """Return a text, or a pair of texts, with ids as in training.

    Raises:
        UserError: there is no text, or it is longer than the model's context.
    """
    from smlp.inference.masked import MaskedLanguageModel
    from smlp.plots.attention import SeenText

    parts, most = [part.strip() for part in sentence.split(SEPARATOR)], model.core.config.max_tokens
    if not all(parts):
        raise UserError(f"--text {sentence!r}: a text is empty")
    if len(parts) > 2:
        raise UserError(f"--text {sentence[:60]!r}: {len(parts)} texts, but models read at most two together")
    if isinstance(model, MaskedLanguageModel):
        ids = model.tokenize(*parts)
    else:
        ids = [model.start_token, *model.tokenize("\n".join(parts))]
    if len(ids) > most:
        raise UserError(f"--text {sentence[:60]!r} of {len(ids)} tokens is longer than the model's context of {most}")
    return SeenText(f" {SEPARATOR} ".join(parts), ids)


def _first_lines(model: LanguageModel | MaskedLanguageModel, stream: BinarizedTokens, name: str) -> list[SeenText]:
    """Return the first lines of a stream that have two words or more, cut if they are long."""
    from smlp.inference.masked import MaskedLanguageModel
    from smlp.plots.attention import SeenText
    from smlp.text.tokenizer import Vocabulary

    start = Vocabulary.bos if isinstance(model, MaskedLanguageModel) else model.start_token
    most, texts, end = min(model.core.config.max_tokens, _MOST_TOKENS), [], 0
    for number, length in enumerate(stream.lengths.tolist(), 1):
        end += length
        if length > 2:  # two words and the end of the line
            ids = [start, *stream.tokens[end - length : end].tolist()]
            texts.append(SeenText(f"line {number} of {name}", ids[:most]))
        if len(texts) == MOST_TEXTS:
            break
    return texts


def _labels(model: LanguageModel | MaskedLanguageModel) -> list[str]:
    """Return the labels of pieces in a picture: their symbols, or their text if these are numbers (byte-level BPE)."""
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
    if not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise UserError(f"--{option} takes numbers with commas between them, such as 0,3,6, or all; got {words!r:.60}")
    return [int(number) for number in numbers]


def _samples(args: argparse.Namespace, model: LanguageModel, stream: BinarizedTokens) -> Samples:
    from smlp.evaluation.samples import Cutting, cut

    cutting = Cutting.in_blocks(model.decoder.config, model.start_token)
    return cut(stream.tokens, stream.lengths, cutting).up_to(args.limit_tokens)


def _print(arch: str, plots: WeightPlots) -> None:
    if plots.layers:
        _print_filters(arch, plots)
    if plots.routing is not None:
        _print_routing(plots)
    for found in plots.attention:
        _print_attention(found)
    for sentence in plots.left_out:
        print(f"left out: {sentence}")
    print(f"in {plots.figures[0].parent}:")
    for path in plots.figures:
        print(f"  {path.name}")


def _print_filters(arch: str, plots: WeightPlots) -> None:
    from smlp.plots.filters import random_toeplitz_share

    print(f"spatial filters of {arch}; Toeplitz share of the energy, least, mean and most of a layer's matrices")
    if any(layer.is_toeplitz for layer in plots.layers):
        print("(the matrices are Toeplitz by construction)")
    head = ["least", "mean", "most", "random", "half within", "rms weight"]
    if not plots.layers[0].is_causal:
        head.append("ahead")
    print(f"{'layer':<7}{'kind':<23}{'matrices':>8}{'T':>6}" + "".join(f"{name:>13}" for name in head))
    for layer in plots.layers:
        numbers = plots.filters[layer.layer]
        shares = [each.toeplitz_share for each in numbers if each.toeplitz_share is not None]
        reach = [each.half_energy_distance for each in numbers if each.half_energy_distance is not None]
        cells = ["-"] * 3 if not shares else [f"{f(shares):.4f}" for f in (min, statistics.mean, max)]
        cells.append(f"{random_toeplitz_share(layer.size, layer.is_causal)[0]:.4f}")
        cells.append(f"{statistics.mean(reach):.0f} tokens" if reach else "-")
        cells.append(f"{math.sqrt(statistics.mean(each.weight_rms**2 for each in numbers)):.4g}")
        ahead = [each.ahead_share for each in numbers if each.ahead_share is not None]
        if ahead:
            cells.append(f"{statistics.mean(ahead):.2%}")
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


def _print_attention(found: AttentionMap) -> None:
    layers = f"layers {found.layers[0]} to {found.layers[-1]}"
    print(f"tiny attention, largest weights of {layers} in {found.text.name!r} (without <s>, </s> and the diagonal)")
    for pair in found.strongest():
        words = f"{found.symbols[pair.query]} ({pair.query}) -> {found.symbols[pair.key]} ({pair.key})"
        print(f"{pair.weight:>8.4f}  layer {pair.layer:<4}{words}")
