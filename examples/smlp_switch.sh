#!/usr/bin/env bash
# sMLP with Switch's router of tokens, with the recipe of Table 8
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_sparse smlp_switch "$@"
