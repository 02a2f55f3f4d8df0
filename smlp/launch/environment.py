"""The environment of a computation, for the record: versions, machine, revision, plug-ins."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import smlp
from smlp.config import plugins
from smlp.launch.machine import num_cores

_PACKAGES = ("torch", "numpy", "ve-fairseq", "fairseq-fixed", "fairscale", "sentencepiece", "hydra-core", "omegaconf")


def environment() -> dict[str, Any]:
    """Return the environment of this process, by name."""
    return {
        "smlp": smlp.__version__,
        **_versions(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "processor": _processor(),
        "cores": num_cores(),
        "git": git_revision(Path(smlp.__path__[0]).parent),
        "plugins": _plugins(),
    }


def git_revision(folder: Path) -> dict[str, Any] | None:
    """Return a clone's revision, whether tracked files differ from it and, if so, the SHA-256 of the difference.

    Returns:
        None if the folder is not a clone.
    """

    try:
        top = os.fsdecode(_git(folder, "rev-parse", "--show-toplevel").removesuffix(b"\n"))
        if Path(top).resolve() != folder.resolve():
            return None  # installed inside another repository
        revision, status = _git(folder, "rev-parse", "HEAD").strip(), _git(folder, "status", "--porcelain", "-uno")
        found = {"revision": revision.decode(), "changed": bool(status)}
        if found["changed"]:
            found["difference_sha256"] = hashlib.sha256(_difference(folder)).hexdigest()
        return found
    except (OSError, subprocess.SubprocessError):
        return None


def keep_difference(git: dict[str, Any] | None, to: Path) -> None:
    """Write the changes of a clone since its revision to ``changes-SHA256.patch`` (12 digits of the hash) in ``to``.

    Args:
        git: of :func:`git_revision` for this package; nothing is written if nothing was changed.
        to: an existing folder.
    """
    if git is None or not git["changed"]:
        return
    with suppress(OSError, subprocess.SubprocessError):
        difference = _difference(Path(smlp.__path__[0]).parent)
        (to / f"changes-{git['difference_sha256'][:12]}.patch").write_bytes(difference)


def _difference(folder: Path) -> bytes:
    """Return what ``git apply`` takes, whatever the encoding and the line ends of the files that were changed."""
    as_without_configuration = ("--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short")
    return _git(folder, "diff", "--binary", *as_without_configuration, "--src-prefix=a/", "--dst-prefix=b/", "HEAD")


def _git(folder: Path, *words: str) -> bytes:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=20).stdout


def _plugins() -> dict[str, str]:
    """Return the SHA-256 of each file in SMLP_PLUGINS, by its name, or by its path if two files have the same name."""
    files = plugins.named_files(os.environ.get(plugins.VARIABLE, ""))
    names = [path.name for path in files]
    found = {path.name if names.count(path.name) == 1 else str(path): path for path in files}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
            found["fairseq" if "fairseq" in name else name] = f"{name} {version}" if "fairseq" in name else version
    return found


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
