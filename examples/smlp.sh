#!/usr/bin/env bash
# sMLP, features routed deterministically: 28 gMLP and 12 sparse blocks, 32 experts (Table 8)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_sparse smlp "$@"
