"""Checks of ``smlp doctor``: what they found, on the screen and in a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from smlp.cli.json_file import write_json

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report; ``remedy`` is empty when there is nothing to do."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def report(checks: Iterable[Check], json_file: str | None) -> int:
    """Prints each check as it comes, and a summary; returns the exit status, 1 if there is a problem."""
    done = []
    for check in checks:
        done.append(check)
        print(f"{check.status:>7}  {check.name}: {check.detail}", flush=True)
        if check.remedy:
            print(f"{'':>7}  -> {check.remedy}", flush=True)
    problems = sum(check.status == PROBLEM for check in done)
    warnings = sum(check.status == WARNING for check in done)
    counted = {"check": len(done), "warning": warnings, "problem": problems}
    print(", ".join(f"{number} {what}{'s' * (number != 1)}" for what, number in counted.items()), flush=True)
    if json_file:
        write_json(json_file, {"ok": problems == 0, "checks": [dataclasses.asdict(check) for check in done]})
    return 1 if problems else 0
