"""Recording updates with torch's profiler."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from smlp.costs.ranges import named_parts
from smlp.files import copy_whole
from smlp.nn.decoder import Decoder
from smlp.parallel.spans import UPDATE, span


@contextmanager
def recording(model: Decoder, device: torch.device) -> Iterator[profile]:
    """A profile of what is done while this context is open, the parts of the model named."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler reports its own starts and stops
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what came before is not to be seen
    with named_parts(model), profile(activities=activities) as recorded:
        yield recorded


@contextmanager
def update_range(device: torch.device) -> Iterator[None]:
    """The range of one update; on a GPU it ends when the device is done."""
    with span(UPDATE):
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def trace_of(recorded: profile, path: Path | None = None) -> dict[str, Any]:
    """The Chrome trace of a profile that is over, which is also kept in a file where one is given.

    Raises:
        OSError: there is no room for it.
        UserError: the file cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(written))
        try:
            trace = json.loads(written.read_text(encoding="utf-8"))
        except json.JSONDecodeError:  # torch says nothing of a write that failed
            raise OSError(errno.ENOSPC, "the trace was cut short (is the disk full?)", str(written)) from None
        if path is not None:
            copy_whole(written, path)
        return trace
