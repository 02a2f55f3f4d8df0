"""``smlp user-dir``: where this package is, for fairseq's own commands."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    return subparsers.add_parser(
        "user-dir",
        help="print the directory for --user-dir",
        description="Prints the directory of this package, which fairseq's own commands take as --user-dir.",
        epilog="example:\n"
        "  fairseq-train data-bin --user-dir $(smlp user-dir) --task language_modeling --arch smlp_tiny ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run(args: argparse.Namespace) -> int:
    from smlp.cli.fairseq_tool import package_dir

    print(package_dir())
    return 0
