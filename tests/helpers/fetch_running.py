"""Running ``smlp data fetch`` in this process, and what it wrote."""

from __future__ import annotations

from data_prep.flow.documents import FORMATS, ReadSettings, read
from data_prep.flow.manifest import read_manifest
from data_prep.flow.parts import find_files, plan_parts
from smlp.cli.main import main

QUICK = ["--workers", "1", "--quiet", "--attempts", "2", "--retry-wait", "0.01", "--timeout", "5"]


def run(*words):
    return main(["data", "fetch", *map(str, words)])


def documents(out):
    """What ``smlp data clean --in OUT`` reads."""
    parts = plan_parts(find_files([out], FORMATS))
    return [piece for part in parts for piece in read(part, ReadSettings())]


def texts(out):
    return sorted(piece.text for piece in documents(out))


def counts(out):
    return read_manifest(out, "fetch")["counts"]


def source_file(folder, name, body):
    path = folder / f"{name}.toml"
    path.write_text(f'title = "{name}"\n{body}')
    return path
