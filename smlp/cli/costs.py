"""``smlp costs``: show where the time of an update goes, layer by layer."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smlp.cli.numbers import MOST_PROCESSES, MOST_SECONDS, MOST_SIZE, real, whole

if TYPE_CHECKING:
    import torch

    from smlp.config import ModelConfig
    from smlp.costs.profiled import Measured
    from smlp.launch.ranks import Place
    from smlp.parallel import ExpertLayout

DESCRIPTION = "where the time of an update goes: stages of the sparse layers and the rest, on one rank or several"
EPILOG = """examples:
  smlp costs --arch smlp_tiny
  smlp costs --arch smlp_tiny --nproc 2 --trace trace.json --json costs.json
  torchrun --nproc-per-node 8 --no-python smlp costs --arch smlp --batch-size 2

A model with random weights is trained on random tokens: some updates as they are, for the time of an update, and as
many under torch's profiler, for the shares. All numbers are those of rank 0 unless stated otherwise. The stages of a
sparse layer are: gate (scores and auxiliary losses), assign (which token goes to which expert), permute (into the order
of the experts and back), out and back (the all-to-all to the experts' ranks and back, waiting for a slower rank
included), experts, skew (waiting for the other ranks to arrive at the layer). The backward pass of a stage is part of
it. The optimizer is Adam; gradients are reduced after the backward pass. --nproc starts ranks on this machine; under
torchrun or srun, the command finds the other ranks by itself.
The trace (with several ranks one each: trace.rank0.json, ...) opens in chrome://tracing and https://ui.perfetto.dev.
"""

#: short names of stages for column heads
_HEADS = {"assignment": "assign", "all-to-all out": "out", "all-to-all back": "back"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--arch", required=True, help="architecture")
    size = whole(1, MOST_SIZE)
    parser.add_argument("--tokens", **size, help="T, context to build it with (default: the architecture's)")
    parser.add_argument("--experts", **size, help="E to build it with (default: the architecture's)")
    parser.add_argument("--batch-size", **size, default=4, help="B, sequences on each rank (default: %(default)s)")
    parser.add_argument("--updates", **whole(), default=5, help="updates to measure (default: %(default)s)")
    parser.add_argument(
        "--nproc", **whole(1, MOST_PROCESSES), default=1, help="ranks to start on this machine (default: %(default)s)"
    )
    parser.add_argument("--expert-parallel-size", **whole(), help="P, ranks that share the experts (default: most)")
    parser.add_argument("--checkpoint-activations", action="store_true", help="as in training")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument(
        "--timeout",
        **real(1, MOST_SECONDS),
        default=600,
        help="seconds that a rank waits for the others (default: %(default)s)",
    )
    parser.add_argument("--trace", metavar="FILE", help="also write a Chrome trace")
    parser.add_argument("--json", metavar="FILE", help="also write the result here")


def run(args: argparse.Namespace) -> int:
    """Measure and, on rank 0, print the tables; with ``--nproc``, start the ranks that do so."""
    from smlp.cli.json_file import check_outputs
    from smlp.cli.options import refuse_other_ranks
    from smlp.files import check_writable
    from smlp.launch.local import run_ranks, this_program
    from smlp.launch.ranks import has_terminal, place_of
    from smlp.parallel import ExpertLayout

    config = _config(args)
    place = place_of(os.environ, is_interactive=has_terminal())
    if place is not None:
        refuse_other_ranks(None if args.nproc == 1 else args.nproc, place)
    num_ranks = args.nproc if place is None else place.world_size
    # dense models have no expert layout
    layout = ExpertLayout(
        config.num_experts if config.num_sparse_layers else 1,
        num_ranks,
        0 if place is None else place.rank,
        args.expert_parallel_size,
    )
    device = _device(args, place)
    if place is None and args.nproc > 1:
        return run_ranks([*this_program(), *args.words, "--nproc", "1"], args.nproc)
    trace = _trace_file(args.trace, layout)
    if trace is not None:
        check_outputs(trace=str(trace), json=args.json)
        check_writable(trace, "--trace")
    measured = _measure(args, config, place, device, trace)
    if measured is not None:
        _report(args, config, layout, device, measured)
    return 0


def _config(args: argparse.Namespace) -> ModelConfig:
    """Return the configuration of the model; refuse options that do not fit it."""
    from smlp.cli.json_file import check_outputs
    from smlp.config.presets import preset
    from smlp.errors import UserError

    check_outputs(trace=args.trace, json=args.json)
    given = {"max_tokens": args.tokens, "num_experts": args.experts}
    config = preset(
        args.arch,
        **{name: value for name, value in given.items() if value is not None},
        checkpoint_activations=args.checkpoint_activations,
    )
    for name in ("experts", "expert_parallel_size"):
        if getattr(args, name) is not None and not config.num_sparse_layers:
            raise UserError(f"--{name.replace('_', '-')} has no effect for {args.arch}, which has no sparse blocks")
    least = config.prefix_tokens + 2
    if config.max_tokens < least:
        raise UserError(f"a context of {config.max_tokens} tokens is too short: --tokens must be at least {least}")
    if args.trace == "-":
        raise UserError("--trace needs the name of a file, got -")
    return config


def _device(args: argparse.Namespace, place: Place | None) -> torch.device:
    """Return the device of this rank; refuse GPUs that are fewer than the ranks."""
    import torch

    from smlp.errors import UserError
    from smlp.launch.ranks import device_index

    visible = 0 if args.cpu else torch.cuda.device_count()
    if visible == 0:
        return torch.device("cpu")
    if place is None and visible < args.nproc:
        raise UserError(f"--nproc {args.nproc} on a machine with {visible} visible GPU(s): give fewer, or --cpu")
    return torch.device("cuda", 0 if place is None else device_index(place, visible))


def _trace_file(trace: str | None, layout: ExpertLayout) -> Path | None:
    """Return the file of a rank's trace: with several ranks, trace.json becomes trace.rank0.json for the first."""
    if trace is None:
        return None
    path = Path(trace)
    return path if layout.world_size == 1 else path.with_suffix(f".rank{layout.rank}{path.suffix}")


def _measure(
    args: argparse.Namespace, config: ModelConfig, place: Place | None, device: torch.device, trace: Path | None
) -> list[Measured] | None:
    """Measure on every rank; return the measurements of all ranks on rank 0, None on the others."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from smlp.costs.profiled import measure
    from smlp.launch.team import leave, meet
    from smlp.parallel import connect

    if device.type == "cuda":
        torch.cuda.set_device(device)
    num_experts = config.num_experts if config.num_sparse_layers else 1
    if place is None:
        return [measure(config, connect(num_experts), args.batch_size, args.updates, device, trace)]
    timeout = timedelta(seconds=args.timeout)
    meet(place, "nccl" if device.type == "cuda" else "gloo", timeout)
    try:
        ranks = connect(num_experts, args.expert_parallel_size, timeout)
        own = measure(config, ranks, args.batch_size, args.updates, device, trace)
        measured = [None] * place.world_size if place.rank == 0 else None
        dist.gather_object(own, measured)
        return measured
    finally:
        leave()


def _report(
    args: argparse.Namespace,
    config: ModelConfig,
    layout: ExpertLayout,
    device: torch.device,
    measured: list[Measured],
) -> None:
    """Print the tables and write the files that are asked for."""
    from smlp.cli.json_file import write_json

    is_sparse = config.num_sparse_layers > 0
    report = {
        "arch": args.arch,
        "device": device.type,
        "ranks": layout.world_size,
        "expert_parallel_size": layout.group_size,
        "experts": layout.num_experts if is_sparse else 0,
        "experts_per_rank": layout.num_local if is_sparse else 0,
        "tokens": config.max_tokens,
        "batch_size": args.batch_size,
        "by_rank": [
            {"update_ms": [1e3 * seconds for seconds in each.seconds], "profiled": each.costs} for each in measured
        ],
    }
    _print(report)
    if args.trace:
        print(f"trace: {_trace_file(args.trace, layout)}" + (" and so on" if layout.world_size > 1 else ""))
    write_json(args.json, report)


def _print(report: dict[str, Any]) -> None:
    from statistics import median

    from smlp.parallel.spans import STAGES

    ranks = [rank["profiled"] for rank in report["by_rank"]]
    first, times = ranks[0], report["by_rank"][0]["update_ms"]
    experts = report["experts"]
    print(
        f"{report['arch']}: {len(ranks)} {'ranks' if len(ranks) > 1 else 'rank'} on {report['device']}"
        + (f", {report['experts_per_rank']} of {experts} experts on each" if experts else "")
        + f"; {report['batch_size']} x {report['tokens']} tokens on each"
    )
    print(
        f"an update takes {median(times):.1f} ms ({min(times):.1f} to {max(times):.1f}); {first['ms']:.1f} ms under "
        "the profiler, on which the tables are based"
    )
    if first["layers"]:
        _print_row("% of the update", [_HEADS.get(stage, stage) for stage in STAGES] + ["sum"])
        for name, stages in first["layers"].items():
            _print_row(name, _shares(stages))
        _print_row("all sparse layers", _shares(first["stages"]))
        in_ms = [first["stages"][stage]["ms"] for stage in STAGES]
        _print_row("  in ms", [*in_ms, sum(in_ms)])
        if len(ranks) > 1:
            columns = list(zip(*(_shares(rank["stages"]) for rank in ranks), strict=True))
            _print_row("  least of a rank, %", [min(column) for column in columns])
            _print_row("  most of a rank, %", [max(column) for column in columns])
    sparse = {key: sum(stage[key] for stage in first["stages"].values()) for key in ("ms", "share")}
    rows = {"sparse layers": sparse, **first["parts"], "update": {"ms": first["ms"], "share": 1.0}}
    print(f"{'':<25}{'ms':>9}{'%':>9}")
    for name, part in rows.items():
        print(f"{name:<25}{part['ms']:>9.1f}{100 * part['share']:>9.1f}")


def _shares(stages: dict[str, dict[str, float]]) -> list[float]:
    """Return the shares in percent, in the order of the stages, and their sum."""
    shares = [100 * stage["share"] for stage in stages.values()]
    return [*shares, sum(shares)]


def _print_row(name: str, values: list[Any]) -> None:
    cells = (
        f"{value:>9}" if isinstance(value, str) else f"{value:>9.1f}" if value else f"{'-':>9}" for value in values
    )
    print(f"{name:<21}" + "".join(cells))
