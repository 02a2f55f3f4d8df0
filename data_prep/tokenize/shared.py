"""What the steps that use a tokenizer share: its files with their checksums, and the texts that it cannot encode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.flow.streams import sha256_of
from smlp.text.tokenizer_files import DICTIONARY, TOKENIZER_FILES

NOT_TEXT = "not text: half of a surrogate pair"


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer's folder: its dictionary, and the model where there is one."""
    return [folder / name for name in (DICTIONARY, *TOKENIZER_FILES) if (folder / name).is_file()]


def tokenizer_setting(folder: Path) -> dict[str, Any]:
    """A tokenizer among a step's settings, so that another one in the same folder is noticed."""
    return {"path": str(folder), "sha256": {path.name: sha256_of(path) for path in tokenizer_files(folder)}}
