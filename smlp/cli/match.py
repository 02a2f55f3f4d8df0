"""``smlp match``: settings of every model family for the same FLOPs per token."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from smlp.cli.numbers import MOST_SIZE, real, whole

DESCRIPTION = "settings of every model family whose forward FLOPs per token agree"
EPILOG = """examples:
  smlp match --like smlp
  smlp match --like smlp_tiny --vary ffn --json match.json
  smlp match --flops-per-token 6e6 --embed-dim 256 --tokens 128 --vocab-size 8192 --experts 8

Each family starts from its preset (of the size of --like, where it has one). --vary layers changes numbers of layers,
keeping the share of sparse ones as near to the preset's as possible; if whole layers are too coarse, the feed-forward
width changes too, by up to 25 %. --vary ffn keeps the layers and changes only that width, in steps of 8. FLOPs are
nominal, by formula, as in "smlp flops": multiply-adds of the forward pass. Every match is within 0.5 % of the target,
so any two agree within 1 %. The arguments are for fairseq-train; the vocabulary comes with the data.
exit status: 0 all families match, 1 one does not.
"""
MOST_FLOPS = 1e18  # per token


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--flops-per-token", **real(0, MOST_FLOPS, above=True), metavar="X", help="multiply-adds of the forward pass"
    )
    target.add_argument("--like", metavar="ARCH", help="architecture to match, in its context, vocabulary and width")
    parser.add_argument(
        "--vary", choices=("layers", "ffn"), default="layers", help="what to change (default: %(default)s)"
    )
    parser.add_argument("--tokens", **whole(1, MOST_SIZE), help="T, context (default: that of --like, or 1024)")
    parser.add_argument("--vocab-size", **whole(1, MOST_SIZE), help="V (default: that of --like, or 51200)")
    parser.add_argument("--embed-dim", **whole(1, MOST_SIZE), help="H (default: that of --like, or 1024)")
    parser.add_argument("--experts", **whole(1, MOST_SIZE), help="E in every sparse layer (default: each family's own)")
    parser.add_argument("--json", metavar="FILE", help="also write the result here")


def run(args: argparse.Namespace) -> int:
    """Print the settings; return 1 if a family has none."""
    from smlp.cli.json_file import check_outputs, write_json
    from smlp.config.presets import preset
    from smlp.costs.match import check_target, families, like

    check_outputs(json=args.json)
    given = {"max_tokens": args.tokens, "vocab_size": args.vocab_size, "embed_dim": args.embed_dim}
    shared = {name: value for name, value in given.items() if value is not None}
    if args.like is not None:
        target, size, shared = like(args.like, shared)
    else:
        target, size = args.flops_per_token, ""
        check_target(target)
    common = preset("gmlp_lm", **shared)  # it takes any width
    if args.experts is not None:
        shared["num_experts"] = args.experts
    like_what = f" ({args.like})" if args.like else ""
    print(
        f"target{like_what}: {target / 1e6:.3f} M multiply-adds per token; T={common.max_tokens}, "
        f"V={common.vocab_size}, H={common.embed_dim}; parameters in millions, experts for one rank"
    )
    print(f"{'family':<14}{'M per token':>12}{'difference':>12}{'expert/rank':>13}{'other':>10}{'total':>12}")
    rows = [_match(family, target, args.vary, size, shared) for family in families()]
    failed = [row["family"] for row in rows if not row["matches"]]
    print(f"no match: {', '.join(failed)}" if failed else "all families match")
    result = {"flops_per_token": target, "like": args.like, "vary": args.vary, "families": rows}
    write_json(args.json, result)
    return 1 if failed else 0


def _match(family: str, target: float, vary: str, size: str, shared: dict[str, Any]) -> dict[str, Any]:
    """Find and print the settings of a family; a family that cannot be built does not match."""
    from smlp.costs.formula import parameters
    from smlp.costs.match import SHARE_RANGE, TOLERANCE, match
    from smlp.errors import UserError

    try:
        found = match(family, target, vary, size, shared)
    except UserError as error:
        print(f"{family:<14}cannot be built: {error}")
        return {"family": family, "matches": False, "error": str(error)}
    config, params = found.config, parameters(found.config)
    millions = [count / 1e6 for count in (params.expert_per_rank, params.other, params.total)]
    print(
        f"{family:<14}{found.flops_per_token / 1e6:>12.3f}{found.difference:>+12.3%}"
        f"{millions[0]:>13.3f}{millions[1]:>10.3f}{millions[2]:>12.3f}"
    )
    moved = []
    if found.width_moved:
        moved.append(f"feed-forward width {config.ffn_dim} instead of {found.start.ffn_dim}")
    if found.share_moved > SHARE_RANGE:
        now, before = (f"{one.num_sparse_layers} of {one.num_layers}" for one in (config, found.start))
        moved.append(f"{now} layers are sparse instead of {before}")
    note = ""
    if not found.matches:
        note = f"no settings within {TOLERANCE:.1%}: these are the nearest"
    elif vary == "layers" and moved:
        note = f"whole layers are too coarse: {', '.join(moved)}"
    print(f"    {' '.join(found.arguments())}" + (f"\n    ({note})" if note else ""))
    return {
        "family": family,
        "matches": found.matches,
        "arguments": found.arguments(),
        "flops_per_token": found.flops_per_token,
        "difference": found.difference,
        "params": asdict(params),
        "note": note,
    }
