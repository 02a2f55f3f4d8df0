"""What ``smlp data dedup`` says at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.dedup.files import CONTAMINATED, REMOVED
from smlp.evaluation.zeroshot.readers import READERS

MAX_ROWS = 20


def describe(manifest: dict[str, Any], out: Path) -> list[str]:
    """Lines: who was removed because of whom, overlap with tasks, where each document of these is named."""
    lines: list[str] = []
    pairs = manifest["pairs"]
    if pairs:
        rows = [[row["removed_from"], row["because_of"], row["kind"], f"{row['documents']:,}"] for row in pairs]
        lines += _table(["removed from", "because of", "kind", "documents"], rows[:MAX_ROWS])
        if len(rows) > MAX_ROWS:
            lines.append(f"and {len(rows) - MAX_ROWS} more pairs of sources, in manifest.json")
    if "contamination" in manifest:
        rows = [
            [
                row["task"],
                f"{row['documents']:,}",
                f"{row['ngrams']:,}",
                f"{row['records_found']:,} of {row['records']:,} ({row['records_found'] / row['records']:.2%})",
                f"{row['records_too_short']:,}",
            ]
            for row in manifest["contamination"]
        ]
        lines += _table(["task", "documents", "n-grams", "records found", "too short to look for"], rows)
        there = {row["task"].split("/")[0] for row in manifest["contamination"]}
        if missing := [name for name in READERS if name not in there]:
            lines.append(f"no file of {', '.join(missing)} in {manifest['settings']['decontaminate']['folder']}")
    if manifest["held_out"]["documents_in"]:
        held_out = manifest["held_out"]
        lost = "".join(f", {number:,} {reason}" for reason, number in held_out["dropped"].items())
        lines.append(f"held out: {held_out['kept']:,} documents{lost}")
    lines.append(f"removed documents, one a line: {out / REMOVED}")
    if CONTAMINATED in manifest:
        lines.append(f"documents that overlap with a task, one a line: {out / CONTAMINATED}")
    return lines


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return ["", *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                  for row in [head, *rows]), ""]  # fmt: skip
