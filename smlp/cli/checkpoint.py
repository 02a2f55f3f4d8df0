"""``smlp checkpoint``: inspect checkpoints, verify them, and turn them into others."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smlp.cli.numbers import MOST, real, whole
from smlp.cli.options import add_tokenizer_option

if TYPE_CHECKING:
    from smlp.config import ModelConfig

DESCRIPTION = "inspect, verify and convert checkpoints"
EPILOG = """examples:
  smlp checkpoint info checkpoints/checkpoint_last.pt
  smlp checkpoint verify checkpoints/*.pt
  smlp checkpoint merge checkpoints/checkpoint_best.pt -o best.pt
  smlp checkpoint merge checkpoints/checkpoint_best.pt -o model.safetensors
  smlp checkpoint split best.pt -o parts/best.pt --parts 8
  smlp checkpoint average checkpoints --num-epoch-checkpoints 5 -o averaged.pt
  smlp checkpoint import exported -o checkpoint.pt
  smlp checkpoint upcycle dense/checkpoint_best.pt -o base.pt --arch base_lm --num-sparse-layers 12

Every input may be a checkpoint in one file, one whose experts are in parts, or an export; inputs are never changed.
'smlp checkpoint COMMAND --help' shows the options of each command.
exit status: 0 success, 1 error (then nothing is written).
"""

_COMMANDS = {
    "info": "describe a checkpoint",
    "verify": "compare every byte with its checksum, and the tensors with the configuration",
    "merge": "write one file: a checkpoint, or a self-contained export",
    "split": "write experts in parts, for any number of ranks; also from an export",
    "import": "make a checkpoint for training from a folder that transformers saved (smlp export --hf)",
    "average": "average the weights of several checkpoints, without the optimizer",
    "upcycle": "make a sparse model that computes the same as a dense one",
}
_UPCYCLE = """copies of a block's feed-forward network become experts (hash, switch, gshard, base), or new sparse
blocks that change nothing at first are added (smlp, gmlp_moe); sizes are those of the dense model. Continue with
  fairseq-train ... --finetune-from-model OUT
or --restore-file OUT --reset-optimizer --reset-lr-scheduler --reset-meters --reset-dataloader, and the options that
this command prints."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands with their options."""
    raw = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    parsers = {
        name: actions.add_parser(name, help=text, description=_UPCYCLE if name == "upcycle" else text)
        for name, text in _COMMANDS.items()
    }
    parsers["upcycle"].formatter_class = raw
    for name, parser_of in parsers.items():
        paths = {"verify": "+", "average": "+"}.get(name)
        what = "checkpoints" + (", or one folder of them" if name == "average" else "") if paths else "checkpoint"
        what = "folder with config.json" if name == "import" else what
        parser_of.add_argument("path", nargs=paths, metavar="PATH", help=what)
        if name not in ("info", "verify"):
            parser_of.add_argument("-o", "--output", required=True, metavar="OUT", help="file to write")
            parser_of.add_argument("--force", action="store_true", help="overwrite OUT if it exists")
    parsers["info"].add_argument("--json", metavar="FILE", help="also write the facts here")
    merge, split, average = (parsers[name] for name in ("merge", "split", "average"))
    for one in (merge, split):
        one.add_argument("--no-optimizer", action="store_true", help="omit the optimizer's state")
    merge.add_argument(
        "--export",
        action="store_true",
        help="write only weights, configuration, dictionary and tokenizer, all that smlp.load_pretrained needs; "
        "always so for OUT.safetensors",
    )
    merge.add_argument("--dict", help="dict.txt for the export, if it is not found")
    add_tokenizer_option(merge)
    split.add_argument("--parts", type=int, required=True, metavar="P", help="files to split the experts into")
    newest = average.add_mutually_exclusive_group()
    newest.add_argument(
        "--num-epoch-checkpoints", **whole(), metavar="N", help="average the last N checkpointE.pt of a folder"
    )
    newest.add_argument(
        "--num-update-checkpoints", **whole(), metavar="N", help="average the last N checkpoint_E_U.pt of a folder"
    )
    average.add_argument(
        "--checkpoint-upper-bound", type=int, metavar="N", help="ignore checkpoints after this epoch or update"
    )
    _add_upcycling(parsers["upcycle"])


def _add_upcycling(parser: argparse.ArgumentParser) -> None:
    from smlp.config import SETTINGS
    from smlp.config.settings import help_of

    parser.add_argument("--arch", required=True, help="architecture of the sparse model")
    parser.add_argument("--router-scale", **real(0, 1e6), metavar="S", help="size of the first weights of the router")
    parser.add_argument(
        "--seed", **whole(0, MOST), metavar="N", default=1, help="random seed of new weights (default: %(default)s)"
    )
    parser.add_argument("--data", help="binarised training data, for --hash-kind balanced")
    for name in _sparse_settings():
        setting, flag = SETTINGS[name], "--" + name.replace("_", "-")
        if setting.type == "bool":
            parser.add_argument(flag, action="store_true", default=None, help=help_of(setting))
        else:
            kind = {"int": int, "float": float}.get(setting.type, str)
            parser.add_argument(flag, type=kind, help=help_of(setting).replace("%", "%%"))


def _sparse_settings() -> list[str]:
    """Return the settings of the model that upcycling leaves open."""
    import dataclasses

    from smlp.config import MoEConfig

    return [
        *("num_dense_layers", "num_sparse_layers", "sparse_placement"),
        *(setting.name for setting in dataclasses.fields(MoEConfig)),
    ]


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    return {
        "info": _info,
        "verify": _verify,
        "merge": _merge,
        "split": _split,
        "import": _import,
        "average": _average,
        "upcycle": _upcycle,
    }[args.action](args)


def _info(args: argparse.Namespace) -> int:
    from smlp.checkpoint.inspection import as_text, summary
    from smlp.checkpoint.opened import open_checkpoint
    from smlp.cli.json_file import write_json

    facts = summary(open_checkpoint(args.path))
    print(as_text(facts))
    write_json(args.json, facts)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from smlp.checkpoint.inspection import problems_of, summary
    from smlp.checkpoint.opened import open_checkpoint
    from smlp.errors import one_line

    failed = False
    for path in args.path:
        problems = problems_of(path)
        for problem in problems:
            print(f"smlp: error: {one_line(problem)}", file=sys.stderr)
        failed |= bool(problems)
        if not problems:
            facts = summary(open_checkpoint(path))
            files = f"{len(facts['files'])} file{'s' if len(facts['files']) > 1 else ''}"
            print(f"{path}: {files}, {facts['bytes']:,} bytes, whole; the tensors are those of its {facts['arch']}")
    return 1 if failed else 0


def _merge(args: argparse.Namespace) -> int:
    from smlp.checkpoint.inspection import open_intact
    from smlp.checkpoint.output import check_target, write_exported, write_one_file
    from smlp.errors import UserError
    from smlp.files import is_safetensors

    texts = [path for path in (args.dict, args.tokenizer) if path is not None]
    target = check_target(args.output, [args.path, *texts], args.force)
    is_export = args.export or is_safetensors(target)
    if texts and not is_export:
        raise UserError(f"{texts[0]} would not be used: only an export has a dictionary and a tokenizer, give --export")
    checkpoint = open_intact(args.path)
    if is_export:
        write_exported(checkpoint, target, args.dict, args.tokenizer)
        return _report(target)
    if args.no_optimizer:
        checkpoint.state.pop("last_optimizer_state", None)
    write_one_file(checkpoint, target)
    return _report(target)


def _split(args: argparse.Namespace) -> int:
    from smlp.checkpoint.inspection import open_intact
    from smlp.checkpoint.output import check_target, write_in_parts

    target = check_target(args.output, [args.path], args.force)
    checkpoint = open_intact(args.path)
    if args.no_optimizer:
        checkpoint.state.pop("last_optimizer_state", None)
    write_in_parts(checkpoint, target, args.parts)
    return _report(target)


def _import(args: argparse.Namespace) -> int:
    from smlp.checkpoint.hf_folder import open_hf_folder
    from smlp.checkpoint.output import check_target, write_one_file

    checkpoint = open_hf_folder(args.path)
    # its tensors are read while the checkpoint is written
    target = check_target(args.output, list(checkpoint.path.iterdir()), args.force)
    write_one_file(checkpoint, target)
    return _report(target)


def _average(args: argparse.Namespace) -> int:
    from smlp.checkpoint.inspection import open_intact
    from smlp.checkpoint.output import averaged, check_target, last_checkpoints, write_one_file
    from smlp.errors import UserError

    paths = args.path
    by_update = args.num_update_checkpoints is not None
    count = args.num_update_checkpoints if by_update else args.num_epoch_checkpoints
    if count is not None:
        if len(paths) != 1:
            raise UserError(f"the last checkpoints of one folder are averaged: name one, not {len(paths)}")
        paths = last_checkpoints(paths[0], count, by_update, args.checkpoint_upper_bound)
    elif args.checkpoint_upper_bound is not None:
        raise UserError("--checkpoint-upper-bound is for --num-epoch-checkpoints and --num-update-checkpoints")
    elif len(paths) == 1 and Path(paths[0]).is_dir():
        raise UserError(f"{paths[0]} is a folder: give --num-epoch-checkpoints N or --num-update-checkpoints N")
    files = [Path(path).resolve() for path in paths]
    if twice := [path for number, path in enumerate(paths) if files[number] in files[:number]]:
        raise UserError(f"{twice[0]} is named twice, and would count twice in the mean")
    target = check_target(args.output, paths, args.force)
    write_one_file(averaged([open_intact(path) for path in paths]), target)
    print(f"mean of {', '.join(str(path) for path in paths)}")
    return _report(target)


def _upcycle(args: argparse.Namespace) -> int:
    from smlp.checkpoint.inspection import open_intact
    from smlp.checkpoint.opened import open_checkpoint
    from smlp.checkpoint.output import check_target, write_one_file
    from smlp.checkpoint.upcycle import check_same_dictionary, target_config, training_arguments, upcycled
    from smlp.text.binarized import count_tokens

    target = check_target(args.output, [args.path], args.force)
    dense = open_intact(args.path)
    overrides: dict[str, Any] = {name: getattr(args, name) for name in _sparse_settings()}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    frequencies_V = None
    if args.data is not None:
        import torch

        frequencies_V = torch.from_numpy(count_tokens(Path(args.data) / "train", dense.config.vocab_size))
        check_same_dictionary(dense, Path(args.data))
    _check_room(target, target_config(dense, args.arch, overrides))
    sparse = upcycled(dense, args.arch, overrides, args.router_scale, args.seed, frequencies_V)
    write_one_file(sparse, target)
    _report(target)
    words = ["--finetune-from-model", str(target), *training_arguments(open_checkpoint(target))]
    print(f"train it with {shlex.join(words)}")
    return 0


def _check_room(target: Path, config: ModelConfig) -> None:
    """Refuse a model whose weights, in 16 bits, have no room on the disk, before anything of its size is made.

    Raises:
        UserError: the message has the sizes.
    """
    from smlp.costs.formula import parameters
    from smlp.errors import UserError

    own = parameters(config, 1)
    size = 2 * (own.expert_per_rank + own.other)
    free = shutil.disk_usage(next(folder for folder in target.absolute().parents if folder.is_dir())).free
    if size > free:
        raise UserError(
            f"a model with {config.num_experts:,} experts has {size / 1e9:,.3g} GB of weights, and the disk has only "
            f"{free / 1e9:,.3g} GB left"
        )


def _report(target: Path) -> int:
    from smlp.checkpoint.inspection import as_text, summary
    from smlp.checkpoint.opened import open_checkpoint

    print(f"wrote {as_text(summary(open_checkpoint(target)))}")
    return 0
