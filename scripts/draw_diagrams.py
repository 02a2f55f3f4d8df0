"""Draw the pictures of docs/concepts.md into docs/diagrams.

  python scripts/draw_diagrams.py                  the SVG files of the pages
  python scripts/draw_diagrams.py --png FOLDER     the same as PNG, to look at

The package's own routing code computes the routing of a small example.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib
from diagrams import blocks, features, tokens
from diagrams.style import SETTINGS

from smlp.cli.main import guarded

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "diagrams"
DRAWINGS = {
    "block-gmlp": blocks.gmlp,
    "block-sparse": blocks.sparse,
    "router-base": tokens.base,
    "router-switch": tokens.switch,
    "router-gshard": tokens.gshard,
    "router-hash": tokens.hashed,
    "features-deterministic": features.deterministic,
    "features-partial": features.partial,
    "features-leaky": features.leaky,
}


def draw(folder: Path, kind: str = "svg") -> list[Path]:
    """Write all drawings into the folder and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with matplotlib.rc_context(SETTINGS):
        for name, drawing in DRAWINGS.items():
            files.append(folder / f"{name}.{kind}")
            drawing().save(files[-1])
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="draw PNG files there instead")
    options = parser.parse_args()
    for file in draw(options.png or FOLDER, "png" if options.png else "svg"):
        print(file)


if __name__ == "__main__":
    sys.exit(guarded(main))
