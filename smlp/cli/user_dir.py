"""``smlp user-dir``: where this package is, for fairseq's own commands."""

from __future__ import annotations

import argparse

DESCRIPTION = "Prints the directory of this package, which fairseq's own commands take as --user-dir."
EPILOG = """example:
  fairseq-train data-bin --user-dir $(smlp user-dir) --task language_modeling --arch smlp_tiny ..."""


def run(args: argparse.Namespace) -> int:
    from smlp.fairseq_compat.command_line import package_dir

    print(package_dir())
    return 0
