"""``smlp flops``: parameters and FLOPs of a model, component by component."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from smlp.cli.numbers import MOST_SIZE, whole

if TYPE_CHECKING:
    from smlp.config import ModelConfig

DESCRIPTION = "parameters and forward FLOPs of a model, by formula and counted by fvcore"
EPILOG = """examples:
  smlp flops --arch smlp
  smlp flops --arch gshard_lm_tiny --tokens 64 --batch 8 --experts 4 --world-size 2 --json flops.json
  smlp flops --path checkpoints/checkpoint_best.pt

FLOPs are counted as the paper does, in fvcore's convention: forward pass; one multiply-add is 1, a layer norm 5 per
element, activations, softmax and residuals 0; attention and spatial products in full, not their causal half. They are
nominal: loads are equal, nothing is padded or dropped, and each token costs the work of its k experts (no dense
dispatch masks are built, here or in training). "counted" is fvcore on the real modules, without weights; blocks that
are alike are traced once.
Expert parameters are those of one of --world-size ranks (default: the paper's 32; for numbers of experts that
32 does not divide, as in the tiny presets, a rank for each expert).
exit status: 0 formula and count agree within 0.5 % and the parameters exactly, 1 they do not.
"""

TOLERANCE = 0.005
_MOST_EXPERTS = 4096  # which take half a minute


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--arch", help="architecture")
    model.add_argument("--path", help="checkpoint; needs neither its dictionary nor its data")
    parser.add_argument(
        "--tokens",
        **whole(1, MOST_SIZE),
        help="T, the context to build --arch with; for --path, the length of the inputs",
    )
    parser.add_argument(
        "--batch", **whole(1, MOST_SIZE), default=2, help="B, sequences (default: %(default)s, as in the paper)"
    )
    parser.add_argument(
        "--experts",
        **whole(1, _MOST_EXPERTS),
        help="E to build --arch with, each of which is traced (default: the architecture's)",
    )
    parser.add_argument("--world-size", **whole(), help="W, ranks among which the experts are divided")
    parser.add_argument("--json", metavar="FILE", help="also write the result here")


def run(args: argparse.Namespace) -> int:
    """Print the table; return 1 if formula and count disagree."""
    from smlp.checkpoint.opened import open_checkpoint
    from smlp.cli.json_file import check_outputs, write_json
    from smlp.config.presets import preset
    from smlp.errors import UserError

    check_outputs(json=args.json)
    if args.path:
        if args.experts is not None:
            raise UserError("--experts is for --arch: a checkpoint has the experts that it was trained with")
        config, num_tokens = open_checkpoint(args.path).config, args.tokens
        if num_tokens is not None and num_tokens > config.max_tokens:
            raise UserError(f"--tokens is {num_tokens}, and {args.path} has a context of {config.max_tokens} tokens")
    else:
        given = {"max_tokens": args.tokens, "num_experts": args.experts}
        config = preset(args.arch, **{name: value for name, value in given.items() if value is not None})
        if args.experts is not None and not config.num_sparse_layers:
            raise UserError(f"--experts has no effect for {args.arch}, which has no sparse blocks")
        num_tokens = None
    if args.world_size is not None and not config.num_sparse_layers:
        raise UserError(f"--world-size has no effect for {args.path or args.arch}, which has no sparse blocks")
    report = account(config, args.batch, num_tokens, args.world_size)
    report = {"arch": args.path or args.arch, **report}
    _print(report, config)
    write_json(args.json, report)
    return 0 if report["agrees"] else 1


def account(config: ModelConfig, num_seqs: int, num_tokens: int | None, world_size: int | None) -> dict[str, Any]:
    """Return parameters and FLOPs of a model and of its components, as plain values.

    Args:
        config: the model.
        num_seqs, num_tokens: B, n (default T).
        world_size: W (default: see :func:`smlp.costs.formula.default_world_size`).

    Raises:
        UserError: a number does not fit the model, or the cost of an operator is unknown.
    """
    from dataclasses import asdict

    from smlp.costs.counted import build_without_weights, counted_flops, counted_parameters
    from smlp.costs.formula import components, default_world_size, experts_per_rank, forward_flops, parameters

    parts, local = components(config, num_tokens), experts_per_rank(config, world_size)
    num_tokens = config.max_tokens if num_tokens is None else num_tokens
    params = parameters(config, world_size)
    decoder = build_without_weights(config)
    flops, sizes = counted_flops(decoder, num_seqs, num_tokens), counted_parameters(decoder)
    formula, counted = forward_flops(config, num_seqs, num_tokens), sum(flops.values())
    rows = [
        {
            "name": part.name,
            "layer": part.layer,
            "kind": part.kind,
            "params": {"expert_per_rank": local * part.expert_params, "other": part.other_params},
            "flops": {
                "formula": round(num_seqs * num_tokens * part.nominal_flops(num_tokens)),
                "fvcore": flops[part.name],
            },
        }
        for part in parts
    ]
    same_sizes = all(sizes[part.name] == (part.num_experts * part.expert_params, part.other_params) for part in parts)
    return {
        "params": asdict(params),
        "flops": {"formula": formula, "fvcore": counted},
        "flops_per_token": formula / (num_seqs * num_tokens),
        "agrees": same_sizes and abs(counted - formula) <= TOLERANCE * formula,
        "tokens": num_tokens,
        "batch": num_seqs,
        "experts": config.num_experts if config.num_sparse_layers else 0,
        "world_size": default_world_size(config) if world_size is None else world_size,
        "components": rows,
    }


def _print(report: dict[str, Any], config: ModelConfig) -> None:
    size = f"T={config.max_tokens}, H={config.embed_dim}, F={config.ffn_dim}, V={config.vocab_size}"
    layers = f"{config.num_dense_layers} dense + {config.num_sparse_layers} sparse blocks"
    experts = f", {report['experts']} experts on {report['world_size']} ranks" if report["experts"] else ""
    print(f"{report['arch']}: {size}, {layers}{experts}; batch {report['batch']} x {report['tokens']}")
    print(f"{'':<20}{'':>5}  {'parameters (M)':^25}  {'multiply-adds (G)':^25}")
    print(f"{'component':<20}{'times':>5}  {'expert/rank':>12} {'other':>12}  {'formula':>12} {'counted':>12}")
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in report["components"]:
        by_kind.setdefault(row["kind"], []).append(row)
    for kind, rows in by_kind.items():
        _print_row(kind, str(len(rows)), _sum(rows, "params"), _sum(rows, "flops"))
    _print_row("total", "", report["params"], report["flops"])
    formula, counted = report["flops"].values()
    print(f"whole model: {report['params']['total'] / 1e6:.3f} M parameters")
    print(f"per token: {report['flops_per_token'] / 1e6:.3f} M multiply-adds")
    verdict = "agree" if report["agrees"] else "DISAGREE (the multiply-adds, or the parameters of the real modules)"
    print(f"counted / formula - 1 = {counted / formula - 1:+.4%}: formula and count {verdict}")


def _sum(rows: list[dict[str, Any]], key: str) -> dict[str, int]:
    return {name: sum(row[key][name] for row in rows) for name in rows[0][key]}


def _print_row(name: str, times: str, params: dict[str, int], flops: dict[str, int]) -> None:
    expert, other = params["expert_per_rank"] / 1e6, params["other"] / 1e6
    formula, counted = flops["formula"] / 1e9, flops["fvcore"] / 1e9
    print(f"{name:<20}{times:>5}  {expert:>12.3f} {other:>12.3f}  {formula:>12.3f} {counted:>12.3f}")
