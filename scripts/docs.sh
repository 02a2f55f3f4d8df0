#!/usr/bin/env bash
# Builds the documentation site from README.md, docs/ and examples/README.md:
#
#   bash scripts/docs.sh            into build/docs; sets up .venv with the extra "docs" first
#   bash scripts/docs.sh FOLDER     into another folder
#
# DOCS_PYTHON=python3 uses that Python, which must already have the extra, and installs nothing. Every warning is an
# error: a broken link to a page, heading or file, a missing picture, a page that is not in the navigation
# (docs/index.md). All pages are rebuilt each time, so that no warning is hidden by an earlier build.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

OUT="$(realpath -m -- "${1:-$ROOT/build/docs}")"
if [ -z "${DOCS_PYTHON:-}" ]; then
    make_environment "docs"
    DOCS_PYTHON="$VENV/bin/python"
fi
cd "$ROOT"
"$DOCS_PYTHON" -m sphinx --builder html --quiet --fresh-env --fail-on-warning --nitpicky \
    --conf-dir docs/site --doctree-dir "$OUT.doctrees" . "$OUT" || fail "the documentation does not build, see above"
echo "documentation: $OUT/index.html"
