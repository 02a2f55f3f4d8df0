"""A browser for tests; where there is none, the test is skipped."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium, remotely controlled by Playwright."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        window = playwright.chromium.launch(
            executable_path=program, args=[*FLAGS, "--disable-component-update", "--disable-sync"]
        )
        try:
            yield window
        finally:
            window.close()
