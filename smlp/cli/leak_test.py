"""``smlp leak-test``: does a later token change an earlier prediction?"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from smlp.cli.numbers import MOST_SEED, MOST_SIZE, whole
from smlp.cli.options import add_tokenizer_option

DESCRIPTION = "check that no later token changes an earlier prediction"
EPILOG = """examples:
  smlp leak-test --arch smlp_tiny
  smlp leak-test --path checkpoints/checkpoint_best.pt

For positions t across the context the tokens from t on are replaced, and the largest change of any logit before t, or
of another sequence, is shown, in evaluation and in training mode; "others" stands where the other sequences were
replaced. In training, balanced assignment (BASE, sMLP) and a limited capacity
(Switch, GShard) look at the whole batch, so a change is expected there; "training, routing fixed" shows that nothing
else lets later tokens through. smlp_leaky routes features by the tokens to be predicted, and fails.
--arch builds all layers, experts and positions of the architecture, but narrow: width has no part in a leak.
exit status: 0 no unexpected leak, 1 a leak.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--arch", help="architecture to build with random weights")
    model.add_argument("--path", help="checkpoint to test")
    parser.add_argument("--dict", help="dict.txt of the checkpoint, if it is not next to it or with its data")
    add_tokenizer_option(parser)
    size = whole(1, MOST_SIZE)
    parser.add_argument("--width", **size, metavar="N", help="H and F to build --arch with (default: 64)")
    parser.add_argument(
        "--tokens", **whole(2, MOST_SIZE), help="context to build --arch with (default: the architecture's)"
    )
    parser.add_argument("--positions", **size, default=9, help="how many values of t to try (default: %(default)s)")
    parser.add_argument(
        "--seed", **whole(-(1 << 63), MOST_SEED), default=1, help="seed of weights and tokens (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result here")


def run(args: argparse.Namespace) -> int:
    """Run the test; return 1 if there is an unexpected leak."""
    from smlp.checkpoint.load import load_language_model
    from smlp.cli.json_file import check_outputs, remove_outputs, write_json
    from smlp.errors import UserError
    from smlp.evaluation.leak import default_positions, leak_test, randomise
    from smlp.nn.build import build
    from smlp.nn.decoder import Decoder

    check_outputs(json=args.json)
    for option in ("dict", "tokenizer"):
        if getattr(args, option) is not None and not args.path:
            raise UserError(f"--{option} {getattr(args, option)} would not be used: it is for --path")
    for option in ("width", "tokens"):
        if args.path and getattr(args, option) is not None:
            raise UserError(f"--{option} is for --arch: a checkpoint has the sizes that it was trained with")
    args.width = 64 if args.width is None else args.width
    if args.path:
        decoder = load_language_model(args.path, args.dict, args.tokenizer, what="smlp leak-test").decoder
    else:
        overrides = {"max_tokens": args.tokens} if args.tokens is not None else {}
        overrides |= {"embed_dim": args.width, "ffn_dim": args.width, "vocab_size": 1000}
        try:
            decoder = build(args.arch, **overrides)
        except UserError as error:
            raise UserError(f"--arch {args.arch} with --width {args.width}: {error}") from None
        if not isinstance(decoder, Decoder):
            raise UserError(
                f"--arch {args.arch} is an encoder, whose positions see later ones: there is no leak to find"
            )
        decoder = randomise(decoder, args.seed)
    positions = default_positions(decoder.config.max_tokens, args.positions)
    config = decoder.config
    size = f"T={config.max_tokens}, H={config.embed_dim}, {config.num_dense_layers} + {config.num_sparse_layers} blocks"
    print(f"{args.path or args.arch}: {size}; t = {', '.join(map(str, positions))}")
    print(f"{'mode':<24}{'precision':<11}{'largest change':>15}{'at t':>7}{'rerouted':>10}  verdict")
    remove_outputs(args.json)
    reports = leak_test(decoder, positions=positions, seed=args.seed)
    for report in reports:
        dtype = str(report.dtype).removeprefix("torch.")
        by_batch = report.expected and (report.leaks or report.rerouted)
        verdict = "expected: routed by batch" if by_batch else "LEAK" if report.leaks else "no leak"
        where = (report.position or "others") if report.largest_change else "-"
        print(
            f"{report.mode:<24}{dtype:<11}{report.largest_change:>15.2e}{where:>7}{report.rerouted:>10.2%}  {verdict}"
        )
    failed = [report for report in reports if not report.passed]
    what = "a later token changes an earlier" if any(report.position for report in failed) else "another text changes a"
    print(f"LEAK: {what} prediction" if failed else "no unexpected leak")
    rows = [{**asdict(r), "dtype": str(r.dtype), "leaks": r.leaks, "passed": r.passed} for r in reports]
    write_json(args.json, {"model": args.path or args.arch, "passed": not failed, "results": rows})
    return 1 if failed else 0
