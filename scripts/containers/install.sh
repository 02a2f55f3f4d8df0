#!/usr/bin/env bash
# Installs smlp into a Python that has torch, as in a container image, without replacing its torch.
#
#   bash scripts/containers/install.sh [EXTRAS] [OPTIONS OF PIP ...]
#   PYTHON=/usr/bin/python3.12 bash scripts/containers/install.sh data,plots
#
# torch and what belongs to it (Triton, torchvision, torchaudio, CUDA's libraries) are constraints, so that pip either
# keeps them or fails; afterwards torch must be the same as before.
set -euo pipefail
ROOT="$(CDPATH= cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHON="${PYTHON:-python}"
EXTRAS="${1:-}"
[ $# -eq 0 ] || shift

fail() {
    echo "smlp: error: $1" >&2
    exit 1
}

torch_here() {
    "$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda)' 2>/dev/null
}

BEFORE="$(torch_here)" || fail "$PYTHON has no torch: choose an image with PyTorch, or use scripts/quickstart.sh"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' ||
    fail "$("$PYTHON" --version): fairseq needs Python 3.11 or 3.12, choose another image"
KEPT="$(mktemp)"
trap 'rm -f "$KEPT"' EXIT
"$PYTHON" -m pip list --format=freeze 2>/dev/null |
    grep -E '^(torch|torchvision|torchaudio|triton|pytorch[_-]triton|nvidia[_-][a-z0-9_-]+)==' > "$KEPT" ||
    fail "pip does not list the torch of $PYTHON, so that it cannot be kept"
echo "packages that must not change: $(tr '\n' ' ' < "$KEPT")"
# fairseq wants torchaudio, whose newest version does not load beside an older torch; releases of both have one number
if ! grep -q '^torchaudio==' "$KEPT"; then
    TORCHAUDIO="$(sed -nE 's/^torch==([0-9]+\.[0-9]+\.[0-9]+)(\+.*)?$/torchaudio<=\1/p' "$KEPT")"
    [ -z "$TORCHAUDIO" ] || echo "$TORCHAUDIO" >> "$KEPT"
fi
"$PYTHON" -m pip install --no-cache-dir --constraint "$KEPT" "$@" "$ROOT${EXTRAS:+[$EXTRAS]}"
AFTER="$(torch_here)" || fail "torch $BEFORE can no longer be imported"
[ "$BEFORE" = "$AFTER" ] || fail "the installation has replaced torch $BEFORE by torch $AFTER"
echo "smlp is installed next to torch $AFTER"
