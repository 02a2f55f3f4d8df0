"""What a recipe takes, from what 'smlp data fetch --dry-run --json' knows of its sources: disk, core hours, cost.

    python examples/data/estimate.py plan.json --workers 16 [--fraction 0.1] [--part cc-news=0.1] [--price 0.04]

Rates are those of one slow core ('smlp data' prints yours); most cores are two to three times as fast.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

# megabytes of text a second and core; of CC-News English text, from pages in all languages
CONVERT = {"wikipedia": 0.6, "cc-news": 0.1, "other": 12.0}
STEPS = {"clean": 2.5, "dedup": 2.5, "sample": 8.0, "binarize": 2.5, "inspect": 40.0}
TOKENIZER_HOURS = 0.5  # 50 MB of sample, whatever the corpus
KEPT = 0.8  # of the text after cleaning and without duplicates
COMPRESSED = 0.38  # of the text, by zstandard
TOKENS_PER_BYTE = 1 / 4.4
STAGES = 4  # fetched, clean, unique, sample: each keeps its documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="what 'smlp data fetch --dry-run --json' wrote")
    parser.add_argument("--workers", type=int, default=1, help="processes, of all tasks together")
    parser.add_argument("--fraction", type=float, default=1.0, help="of the documents that is worked on")
    parser.add_argument(
        "--part", default="", metavar="SOURCE=F", help="fetch only the share F of a source, and use all of it"
    )
    parser.add_argument("--price", type=float, default=0.04, help="price of a core hour")
    parser.add_argument("--link", type=float, default=50.0, help="megabytes a second of the network")
    options = parser.parse_args()
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    if not options.link > 0:
        parser.error(f"--link must be above 0, got {options.link}")
    if not options.plan.is_file():
        parser.error(f"there is no file {options.plan}")
    try:
        sources = json.loads(options.plan.read_text())["sources"]
    except (ValueError, TypeError, KeyError):
        parser.error(f"{options.plan} is damaged, or of something else")
    partial, _, part = options.part.partition("=")
    try:
        share = float(part) if partial else 1.0
    except ValueError:
        parser.error(f"--part {options.part} is not SOURCE=F")
    text = worked_on = 0.0
    convert = 0.0
    for row in sources:
        if not row["text_bytes"]:
            print(f"{row['name']}: the size of its text is not known and not in what follows")
            continue
        own = row["text_bytes"] * (share if row["name"] == partial else 1.0)
        text += own
        worked_on += own * (1.0 if row["name"] == partial else options.fraction)
        convert += own / _rate(row["name"])
    hours = {"fetch": convert / 3.6e9}
    for step, rate in STEPS.items():
        hours[step] = worked_on * (1.0 if step == "clean" else KEPT) / rate / 3.6e9
    hours["tokenizer"] = TOKENIZER_HOURS
    downloads = sum(row["download_bytes"] or 0 for row in sources)
    disk = COMPRESSED * (text + (STAGES - 1) * worked_on) + 4 * worked_on * KEPT * TOKENS_PER_BYTE
    total = sum(hours.values())
    print(f"text {text / 1e9:,.0f} GB, of which {worked_on / 1e9:,.0f} GB are worked on; ", end="")
    print(f"about {worked_on * KEPT * TOKENS_PER_BYTE / 1e9:,.1f} billion tokens are left")
    hours_of_download = downloads / options.link / 3.6e9
    print(f"downloads of known size {downloads / 1e9:,.0f} GB: {hours_of_download:,.1f} hours at {options.link:g} MB/s")
    print("core hours: " + ", ".join(f"{step} {number:,.1f}" for step, number in hours.items()))
    print(
        f"together {total:,.0f} core hours: {total / options.workers:,.1f} hours with {options.workers} workers, "
        f"{total * options.price:,.2f} at {options.price:g} a core hour"
    )
    print(f"disk, downloads deleted as they are converted: about {disk / 1e9:,.0f} GB")


def _rate(source: str) -> float:
    return CONVERT.get(source.split("-export")[0], CONVERT["other"])


if __name__ == "__main__":
    main()
