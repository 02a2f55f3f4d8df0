#!/usr/bin/env bash
# sMLP, features routed deterministically: 22 gMLP and 8 sparse blocks, 32 experts (Tables 5 and 10)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
large smlp_large "$@"
