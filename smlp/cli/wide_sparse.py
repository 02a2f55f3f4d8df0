"""``smlp wide-sparse``: layers of Mixers, gMLPs and sMLPs as wide, sparse layers of an MLP."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from smlp.cli.json_file import check_outputs, write_json
from smlp.cli.numbers import MOST_SEED, whole
from smlp.cli.options import add_model_files, add_tokenizer_option, load_any_model
from smlp.cli.vision import add_run_options
from smlp.errors import UserError

DESCRIPTION = "models as wide, sparse MLPs: widths and connections, singular values, similarity of features"
EPILOG = """examples:
  smlp wide-sparse table --arch smlp --arch smlp_mixer_b16
  smlp wide-sparse spectrum
  smlp wide-sparse spectrum checkpoints/checkpoint_best.pt --json spectrum.json
  smlp wide-sparse cka mixer/model_best.pth.tar sparse/model_best.pth.tar --data-dir data/cifar10
  smlp wide-sparse run examples/wide_sparse/digits.yaml --out runs/wide_sparse/digits --jobs 2

The view, its formulas and what is measured are in docs/wide_sparse.md.
"""
_COMMANDS = {
    "table": "effective width, density, connections and reuse of weights, of presets and of the paper's models",
    "spectrum": "largest singular values: random masked matrices, or spatial matrices of a model",
    "cka": "similarity of the hidden features of two image models, or of two language models",
    "run": "train image models along an axis, such as the effective width at fixed connections, and report",
    "report": "report of finished runs: tables and a figure",
}
_RUN = """train the models of a sweep with several seeds; OUT gets report.md, report.json, report.png and a folder for
each run

The same command resumes interrupted runs; finished runs are kept, and points and seeds can be added. The runner is that
of smlp vision compare. docs/wide_sparse.md describes the file.

exit status: 0 all runs are done, 1 one failed, 75 stopped by a signal, 130 by Ctrl-C (the same command
resumes)"""
#: channels of Figure 4 (right)
_CHANNELS = (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 64)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands with their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    declare = {
        "table": _table_options,
        "spectrum": _spectrum_options,
        "cka": _cka_options,
        "run": add_run_options,
        "report": _report_options,
    }
    for name, summary in _COMMANDS.items():
        description = _RUN if name == "run" else summary
        declare[name](
            actions.add_parser(
                name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
            )
        )


def _table_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        action="append",
        metavar="NAME",
        help="architecture or image model; may be repeated (default: all of them, and the paper's rows)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")


def _spectrum_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group()
    model.add_argument("path", nargs="?", metavar="CHECKPOINT", help="language model, in one file or in parts")
    model.add_argument("--arch", metavar="NAME", help="architecture with its initial weights")
    add_model_files(parser)
    parser.add_argument(
        "--trials",
        **whole(0, 1000),
        metavar="N",
        help="without a model: random matrices for each width, some ten seconds each (default: the formulas alone)",
    )
    parser.add_argument("--seed", **whole(0, MOST_SEED), metavar="N", help="seed of random weights (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers here")


def _cka_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="CHECKPOINT", help="checkpoint of smlp vision train, or a language model")
    parser.add_argument("second", metavar="CHECKPOINT", help="the other checkpoint, of the same kind")
    parser.add_argument(
        "--data-dir",
        required=True,
        metavar="DIR",
        help="holds the split, with a folder for each class; or binarised text, with dict.txt",
    )
    parser.add_argument(
        "--split", metavar="NAME", help="folder of the images, or of the text (default: validation, or valid)"
    )
    parser.add_argument(
        "-b",
        "--batch-size",
        **whole(4, 1 << 16),
        default=128,
        metavar="N",
        help="images, or sequences as long as the context (default: %(default)s)",
    )
    parser.add_argument("--batches", **whole(), metavar="N", help="use the first N batches (default: all whole ones)")
    parser.add_argument("--dict", help="dict.txt of the language models, if it is not found automatically")
    add_tokenizer_option(parser)
    parser.add_argument("--json", metavar="FILE", help="also write the matrix here")


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="DIR", help="folder of smlp wide-sparse run")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    if args.action in ("run", "report"):
        return _run(args) if args.action == "run" else _report(args)
    check_outputs(json=args.json)
    return {"table": _table, "spectrum": _spectrum, "cka": _cka}[args.action](args)


def _table(args: argparse.Namespace) -> int:
    from smlp.wide_sparse.counts import preset_rows
    from smlp.wide_sparse.table import as_json, paper_rows, table_text

    rows = preset_rows(args.arch)
    print(table_text(rows, with_paper=args.arch is None), end="")
    content: dict[str, Any] = {"presets": as_json(rows)}
    if args.arch is None:
        content["paper"] = [vars(row) for row in paper_rows()]
    write_json(args.json, content)
    return 0


def _spectrum(args: argparse.Namespace) -> int:
    _check_used(args)
    args.trials, args.seed = args.trials or 0, 1 if args.seed is None else args.seed
    if args.path or args.arch:
        return _spectrum_of_model(args)
    from smlp.vision.table import aligned
    from smlp.wide_sparse.spectrum import sparse_rows

    rows = sparse_rows(2**19, 2, _CHANNELS, args.trials, args.seed)
    table = [["C", "S", "width", "density", "Mixer", "masked (17)", "as printed", "measured"]]
    for row in rows:
        measured = "-" if row["measured"] is None else f"{row['measured']:.3f}"
        edges = [f"{row[name]:.3f}" for name in ("mixer", "formula", "printed")]
        table.append(
            [str(row["channels"]), str(row["tokens"]), str(row["width"]), f"{row['density']:.4f}", *edges, measured]
        )
    print("largest singular values at 2^19 connections, gamma = 2 (Figure 4, right)\n")
    print(aligned(table, 0))
    write_json(args.json, {"omega": 2**19, "expansion": 2, "trials": args.trials, "seed": args.seed, "rows": rows})
    return 0


def _check_used(args: argparse.Namespace) -> None:
    """Raise ``UserError`` for options that would not be used."""
    files = ("dict", "tokenizer", "device")
    unused = dict.fromkeys(files, "CHECKPOINT") if not args.path else {"seed": "--arch and --trials"}
    if args.path or args.arch:
        unused["trials"] = "random matrices, without a model"
    elif not args.trials:
        unused["seed"] = "--arch and --trials"
    for name, purpose in unused.items():
        if getattr(args, name) is not None:
            raise UserError(f"--{name} {getattr(args, name)} would not be used: it is for {purpose}")


def _spectrum_of_model(args: argparse.Namespace) -> int:
    import torch

    from smlp.plots.filters import spatial_layers
    from smlp.wide_sparse.spectrum import CAUSAL_EDGE, scaled_largest

    if args.path:
        model = load_any_model(args).core
    else:
        from smlp.config.presets import preset
        from smlp.nn.build import model_of

        torch.manual_seed(args.seed)
        model = model_of(preset(args.arch))
    name, layers = args.path or args.arch, spatial_layers(model)
    if not layers:
        raise UserError(f"{name} has no spatial matrices: its tokens are mixed in other ways")
    print(f"largest singular values of the spatial matrices of {name}, weights scaled to variance 1/T")
    rows = []
    for layer in layers:
        matrices = layer.experts.matrices().detach().double()
        if not matrices.isfinite().all():
            raise UserError(f"{name}: the spatial weights of layer {layer.layer} are no finite numbers")
        values = [scaled_largest(matrix, layer.is_causal) for matrix in matrices]
        # a Toeplitz matrix has no independent entries, so that there is no such edge
        edge = None if layer.is_toeplitz else CAUSAL_EDGE if layer.is_causal else 2.0
        known = [value for value in values if value is not None]
        about = f"{min(known):.3f} to {max(known):.3f}" if known else "all weights are zero"
        random = "" if edge is None else f" (random: {edge:.3f})"
        print(
            f"layer {layer.layer:>3}  {layer.kind:<22} {len(values):>4} {layer.unit}s of {layer.size}: {about}{random}"
        )
        rows.append({"layer": layer.layer, "kind": layer.kind, "size": layer.size, "edge": edge, "largest": values})
    write_json(args.json, {"model": name, "layers": rows})
    return 0


def _cka(args: argparse.Namespace) -> int:
    from smlp.text.tokenizer_files import DICTIONARY
    from smlp.vision.table import aligned

    is_text = (Path(args.data_dir) / DICTIONARY).is_file()
    for option, value in (("--dict", args.dict), ("--tokenizer", args.tokenizer)):
        if value is not None and not is_text:
            raise UserError(f"{option} {value} would not be used: {args.data_dir} holds no binarised text")
    found = _cka_of_text(args) if is_text else _cka_of_images(args)
    first, second, matrix = found["first"], found["second"], found["cka"]
    lines = [[name, *(f"{value:.3f}" for value in row)] for name, row in zip(first, matrix, strict=True)]
    print(aligned([["", *second], *lines], 1))
    what = "sequences" if is_text else "images"
    print(f"\nfrom {found[what]:,} {what}, in whole batches of {args.batch_size}")
    if len(first) == len(second):
        print(f"mean of the diagonal: {sum(row[i] for i, row in enumerate(matrix)) / len(first):.4f}")
    write_json(args.json, found)
    return 0


def _cka_of_images(args: argparse.Namespace) -> dict[str, Any]:
    from smlp.cli.vision import import_timm

    import_timm()
    from smlp.wide_sparse.features import compare_checkpoints

    split = args.split or "validation"
    return compare_checkpoints(args.first, args.second, args.data_dir, split, args.batch_size, args.batches)


def _cka_of_text(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from smlp.cli.eval_data import load_model_for, read_text
    from smlp.launch.team import Team
    from smlp.wide_sparse.text_features import compare_language_models

    names, models = (args.first, args.second), []
    for path in names:
        own = argparse.Namespace(
            path=path, data=args.data_dir, dict=args.dict, tokenizer=args.tokenizer, device="cpu", text=None,
            gen_subset=args.split or "valid",
        )  # fmt: skip
        models.append(load_model_for(own, Team(), load_any_model))
    tokens_N = torch.from_numpy(read_text(own, models[0]).stream.tokens)
    return compare_language_models(models, names, tokens_N, args.batch_size, args.batches)


def _run(args: argparse.Namespace) -> int:
    from smlp.cli.vision import import_timm, training_options

    import_timm()
    from smlp.wide_sparse.sweep import read_sweep, run_sweep

    return run_sweep(read_sweep(args.file), args.out, args.jobs, training_options(args.file), args.dry_run)


def _report(args: argparse.Namespace) -> int:
    from smlp.cli.vision import import_timm

    import_timm()
    from smlp.wide_sparse.sweep import write_report

    write_report(args.out)
    return 0
