"""Print the benchmark's rows as text, Markdown and JSON."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("torch", "numpy", "fairscale", "g-mlp-gpt", "g-mlp-pytorch", "triton", "tutel", "megablocks")


@dataclass(frozen=True)
class Row:
    """One comparison of ours with something else, measured in the same run."""

    section: str
    #: what is timed, with its sizes
    what: str
    ours: float
    #: the other one's name and figure
    other: str
    theirs: float
    #: "ms", "MB" and so on
    unit: str
    #: theirs / ours where more of ours is worse
    ratio: float
    #: the least ratio that is wanted, if there is one
    target: float | None = None

    @property
    def holds(self) -> bool | None:
        """Return whether the target is met; None without a target."""
        return None if self.target is None else self.ratio >= self.target


def compared(section: str, what: str, ours: float, other: str, theirs: float, target: float | None = None) -> Row:
    """Make a row of two times in seconds."""
    return Row(section, what, 1e3 * ours, other, 1e3 * theirs, "ms", theirs / ours, target)


def machine(device: str, threads: int) -> dict[str, Any]:
    """Return what the figures depend on: versions, machine, threads."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, {threads} threads"
    return {"date": date.today().isoformat(), "device": name, "python": platform.python_version(), **versions}


def verdict(row: Row) -> str:
    """Return the target and whether it holds, in a few characters."""
    if row.target is None:
        return ""
    return f">= {row.target:.3g} {'holds' if row.holds else 'MISSED'}"


def as_text(row: Row) -> str:
    """Return one line for the terminal."""
    figures = f"{row.ours:10.2f} {row.theirs:10.2f} {row.unit:<3} {row.ratio:7.2f}x"
    return f"{row.what:<58} {row.other:<30} {figures}  {verdict(row)}".rstrip()


def as_markdown(about: dict[str, Any], rows: Iterable[Row], absent: dict[str, str]) -> str:
    """Return the report that is committed under docs/."""
    known = ", ".join(f"{name} {value}" for name, value in about.items() if value and name not in ("date", "device"))
    lines = [
        "# Benchmark",
        "",
        "`python scripts/benchmark.py --markdown FILE` wrote this page; [performance.md](performance.md) explains it.",
        f"Measured on {about['date']}: {about['device']}; {known}.",
        "",
        "The times are medians of alternatives that take turns, but for the start of a process (the least of a few)",
        "and what is measured once (memory, totals). The ratio is theirs / ours.",
    ]
    section = None
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "", "| what | against | ours | theirs | ratio | target |"]
            lines += ["|---|---|---:|---:|---:|---|"]
        lines.append(
            f"| {row.what} | {row.other} | {row.ours:.2f} {row.unit} | {row.theirs:.2f} {row.unit} | "
            f"{row.ratio:.2f} | {verdict(row)} |"
        )
    if absent:
        lines += ["", "Not measured: " + "; ".join(f"{name} ({reason})" for name, reason in absent.items()) + "."]
    return "\n".join(lines) + "\n"


def as_json(about: dict[str, Any], rows: Iterable[Row], absent: dict[str, str]) -> dict[str, Any]:
    """Return the report as plain values."""
    return {"about": about, "rows": [{**asdict(row), "holds": row.holds} for row in rows], "absent": absent}
