"""Many files over HTTP, some at a time, with progress; one that fails is named and the rest goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from data_prep.fetch.download import DownloadFailed, Patience, RemoteFile, download
from data_prep.flow.progress import bytes_bar

GIVE_UP_AFTER = 12  # files that fail one after the other: then it is the network, and the rest is not tried


def download_all(
    files: Sequence[RemoteFile], folder: Path, connections: int, patience: Patience, quiet: bool = False
) -> list[str]:
    """Downloads what is not in ``folder`` yet, ``connections`` files at a time.

    Returns:
        A sentence for each file that could not be had, in the order of ``files``; none if all are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    todo = [file for file in files if not (folder / file.name).is_file()]
    if not todo:
        return []
    sizes = [file.num_bytes for file in todo]
    total = None if None in sizes else sum(sizes)
    there = sum(_partly(folder / file.name) for file in todo)
    label = f"download ({len(todo)} files" + (f", {len(files) - len(todo)} there)" if len(todo) < len(files) else ")")
    with bytes_bar(total, label, quiet, there) as bar:
        return _in_threads(todo, folder, connections, patience, bar)


def _partly(path: Path) -> int:
    partial = path.with_name(path.name + ".partial")
    return partial.stat().st_size if partial.is_file() else 0


def _in_threads(todo: list[RemoteFile], folder: Path, connections: int, patience: Patience, bar: Any) -> list[str]:
    stop, lock = threading.Event(), threading.Lock()
    failures: dict[str, str] = {}
    waiting, running = list(todo), {}
    in_a_row = 0

    def advance(num_bytes: int) -> None:
        with lock:
            bar.update(num_bytes)

    with ThreadPoolExecutor(connections) as pool:
        try:
            while running or (waiting and in_a_row < GIVE_UP_AFTER):
                while waiting and in_a_row < GIVE_UP_AFTER and len(running) < connections:
                    file = waiting.pop(0)
                    future: Future = pool.submit(download, file, folder / file.name, patience, advance, stop)
                    running[future] = file
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    file = running.pop(future)
                    try:
                        future.result()
                        in_a_row = 0
                    except DownloadFailed as error:
                        failures[file.name] = str(error)
                        in_a_row += 1
        except BaseException:
            stop.set()
            raise
    rows = [failures[file.name] for file in todo if file.name in failures]
    if waiting:
        rows.append(f"{len(waiting)} further files were not tried, after {in_a_row} failures in a row")
    return rows
