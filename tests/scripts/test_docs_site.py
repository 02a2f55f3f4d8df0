"""The documentation site: it builds without a warning, holds every page, and its strictness is real."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser import chromium
from running import REPOSITORY, as_user

pytestmark = pytest.mark.slow
DOCS = REPOSITORY / "docs"


def build(repository: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """``scripts/docs.sh`` of that repository, with this Python."""
    environment = {**as_user(), "DOCS_PYTHON": sys.executable}
    command = ["bash", str(repository / "scripts" / "docs.sh"), str(out)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "html"
    done = build(REPOSITORY, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_in_the_navigation(site):
    sidebar = (site / "docs" / "index.html").read_text(encoding="utf-8")
    sidebar = sidebar[sidebar.index('<div class="sidebar-tree">') :]
    sidebar = sidebar[: sidebar.index("</aside>")]
    linked = set(re.findall(r'href="([\w./-]+)\.html"', sidebar))
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")} - {"index"}
    assert pages and linked == pages | {"../README", "../CHANGELOG", "../SECURITY", "../examples/README"}


def test_titles_of_the_sidebar_are_unique(site):
    sidebar = (site / "docs" / "index.html").read_text(encoding="utf-8")
    sidebar = sidebar[sidebar.index('<div class="sidebar-tree">') :]
    titles = re.findall(r'href="[^"]+">([^<]+)</a>', sidebar[: sidebar.index("</aside>")])
    assert len(titles) > 40 and len(set(titles)) == len(titles)


def test_code_has_a_copy_button_and_docstrings_have_a_page(site):
    data = (site / "docs" / "data.html").read_text(encoding="utf-8")
    assert "copybutton.js" in data and "wide.css" in data
    interface = (site / "docs" / "api.html").read_text(encoding="utf-8")
    for name in ("smlp.build", "smlp.load_pretrained", "LanguageModel.generate", "causal_spatial_projection"):
        assert re.search(rf'id="[\w.]*{re.escape(name)}"', interface), name
    assert "Build a model with random weights for a named architecture." in interface


def test_links_out_of_the_folder_lead_to_pages_and_files_of_the_site(site):
    results = (site / "docs" / "results.html").read_text(encoding="utf-8")
    assert 'href="../README.html"' in results
    data = (site / "docs" / "data.html").read_text(encoding="utf-8")
    script = re.search(r'href="\.\./(_downloads/\w+/roberta_tenth\.sh)"', data)
    assert (site / script[1]).read_bytes() == (REPOSITORY / "examples" / "data" / "roberta_tenth.sh").read_bytes()
    assert "docs/index.html" in (site / "index.html").read_text(encoding="utf-8")
    assert (site / "_images" / "quickstart-curves.png").is_file()


def test_no_page_is_wider_than_its_window(site):
    wide = []
    with chromium() as window:
        page = window.new_page()
        for file in sorted({site / "README.html", *(site / "docs").rglob("*.html")}):
            page.goto(file.as_uri())
            for width in (1280, 390):  # of a laptop and a phone
                page.set_viewport_size({"width": width, "height": 800})
                if page.evaluate("document.documentElement.scrollWidth") > width:
                    wide.append((file.name, width))
    assert not wide


BREAKS = {
    "[a](gone.md)": "cross-reference target not found: 'gone.md'",
    "[b](other.md#no-such-heading)": "local id not found in doc 'docs/other': 'no-such-heading'",
    "[c](#nowhere)": "cross-reference target not found: 'nowhere'",
    "[d](../scripts/gone.sh)": "cross-reference target not found: '../scripts/gone.sh'",
    "![e](gone.svg)": "image file not readable: docs/gone.svg",
}


def test_what_is_broken_fails_the_build(tmp_path):
    for name in ("scripts/docs.sh", "scripts/environment.sh", "smlp/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(DOCS / "site", tmp_path / "docs" / "site")
    navigation = "```{toctree}\nother\n```\n"
    (tmp_path / "docs" / "index.md").write_text(f"# Top\n\n[fine](other.md#a-heading)\n\n{navigation}")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## A heading\n\n" + "\n\n".join(BREAKS) + "\n")
    (tmp_path / "docs" / "alone.md").write_text("# Alone\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode == 1
    for markdown, message in BREAKS.items():
        assert message in done.stderr, (markdown, done.stderr)
    assert re.search(r"alone\.md: WARNING: document isn't included in any toctree", done.stderr)
    assert done.stderr.count("WARNING") == len(BREAKS) + 1
    assert done.stderr.endswith("smlp: error: the documentation does not build, see above\n")
