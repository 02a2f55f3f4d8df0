"""Sphinx configuration of the documentation site, which scripts/docs.sh builds.

The source folder is the top of the repository, so that README.md, docs/ and examples/README.md link to each other on
the site as they do in the repository. A link to a file that is no page (a script, a notebook) offers it for download.
"""

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "smlp" / "__init__.py"

project = "smlp"
release = re.search(r'__version__ = "([^"]+)"', PACKAGE.read_text(encoding="utf-8")).group(1)
copyright = "the authors of smlp, MIT licence"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "SECURITY.md", "docs/**.md", "examples/README.md"]
# Folders without pages: the search for pages does not walk through them.
exclude_patterns = [".*", "build", "dist", "data_prep", "docs/site", "outputs", "runs", "scripts", "smlp", "tests"]

myst_heading_anchors = 4  # links such as page.md#a-heading, with the anchors that GitHub makes
smartquotes = False  # "--option" is two hyphens
autodoc_typehints = "description"
autodoc_member_order = "bysource"
suppress_warnings = ["ref.python"]  # a name that two modules offer
# docstrings name functions and classes that have no page
nitpick_ignore_regex = [("py:.*", ".*")]
copybutton_exclude = ".linenos, .gp, .go"
highlight_language = "none"  # of blocks that name none: what programs print

html_theme = "furo"
html_title = f"smlp {release}"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_extra_path = ["top"]  # leads from the top of the site to the root page
html_copy_source = False
html_show_sphinx = False
