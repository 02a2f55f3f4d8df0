"""Record updates with torch's profiler, with the parts of the model named, and keep their traces in files."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from smlp.costs.component import NORMS, PROJECTIONS, SCORES, SPATIAL
from smlp.files import copy_whole
from smlp.moe.feature_layer import FeatureMoE
from smlp.nn.attention import SelfAttention
from smlp.nn.blocks import SpatialGatingUnit
from smlp.nn.decoder import Decoder
from smlp.parallel.spans import SEPARATOR, UPDATE, span


@contextmanager
def recording(model: Decoder, device: torch.device) -> Iterator[profile]:
    """Profile what is done while this context is open, with the parts of the model named."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's messages about its own starts and stops
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # exclude earlier work
    with named_parts(model), profile(activities=activities) as recorded:
        yield recorded


@contextmanager
def update_range(device: torch.device) -> Iterator[None]:
    """Open the range of one update; on a GPU it ends when the device is done."""
    with span(UPDATE):
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def trace_of(recorded: profile, path: Path | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Return the Chrome trace of a finished profile, and write it to a file if one is given.

    Args:
        recorded: the profile.
        path: of the file.
        folder: for what torch writes meanwhile; that of the system by default.

    Raises:
        OSError: there is no room for it.
        UserError: the file cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="profile.", dir=folder) as temporary:
        written = Path(temporary) / "trace.json"
        recorded.export_chrome_trace(str(written))
        try:
            trace = json.loads(written.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):  # torch does not report failed writes, it may remove the file
            raise OSError(errno.ENOSPC, "the trace was cut short (is the disk full?)", str(written)) from None
        if path is not None:
            copy_whole(written, path)
        return trace


#: suffixes of the names of ranges around whole blocks
DENSE_BLOCK, SPARSE_BLOCK = ", dense block", ", sparse block"
#: kinds of modules inside blocks; of nested modules, the inner one counts
MODULE_PARTS = {
    nn.LayerNorm: NORMS,
    nn.Linear: PROJECTIONS,
    SpatialGatingUnit: SPATIAL,
    FeatureMoE: SPATIAL,
    SelfAttention: SCORES,
}


@contextmanager
def named_parts(model: Decoder) -> Iterator[None]:
    """Open a range around each block and the modules of :data:`MODULE_PARTS`, also where they are computed again, while
    this context is open."""
    open_spans: list[AbstractContextManager] = []
    handles = []

    def name_it(module: nn.Module, name: str) -> None:
        def enter(module: nn.Module, inputs: Any) -> None:
            open_spans.append(span(name))
            open_spans[-1].__enter__()

        def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
            open_spans.pop().__exit__(None, None, None)

        handles.append(module.register_forward_pre_hook(enter))
        # also when recomputation stops early, which it does by an exception
        handles.append(module.register_forward_hook(leave, always_call=True))

    for index, block in enumerate(model.blocks):
        name = f"layer {index}" + (SPARSE_BLOCK if hasattr(block, "token_moe") else DENSE_BLOCK)
        name_it(block, name)
        for module in block.modules():
            if (part := _part_of(module)) is not None:
                name_it(module, name + SEPARATOR + part)
    name_it(model.norm, f"decoder{SEPARATOR}{NORMS}")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _part_of(module: nn.Module) -> str | None:
    return next((part for kind, part in MODULE_PARTS.items() if isinstance(module, kind)), None)


#: entries that only draw arrows between others
_ARROWS = ("s", "t", "f")


class TraceFile:
    """A compressed file that collects the traces of one process and gets its name only when it is complete.

    Args:
        path: of the file, ``.json.gz``; nothing is written before the first trace.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.tmp")  # a killed run's file is overwritten
        self._file: Any = None
        self._num_arrows = 0

    def add(self, trace: dict[str, Any]) -> None:
        """Add a trace as torch's profiler writes it.

        Raises:
            OSError: it cannot be written.
        """
        is_first = self._file is None
        if is_first:
            self._file = gzip.open(self._temporary, "wt", compresslevel=5, encoding="utf-8")  # noqa: SIM115
            head = {key: value for key, value in trace.items() if key not in ("traceEvents", "traceName")}
            self._file.write(json.dumps({**head, "traceEvents": []}).removesuffix("]}") + "\n")
        # each profile numbers its arrows from one
        last = self._num_arrows
        lines = []
        for entry in trace["traceEvents"]:
            if entry.get("ph") in _ARROWS:
                entry = {**entry, "id": entry["id"] + last}
                self._num_arrows = max(self._num_arrows, entry["id"])
            lines.append(json.dumps(entry))
        self._file.write(("" if is_first else ",\n") + ",\n".join(lines))

    def close(self) -> None:
        """Complete the file, if there is one.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is not None:
            self._file.write("\n]}\n")
            self._file.close()
            self._file = None
            os.replace(self._temporary, self.path)

    def discard(self) -> None:
        """Remove the incomplete file, after a failure."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        self._temporary.unlink(missing_ok=True)
