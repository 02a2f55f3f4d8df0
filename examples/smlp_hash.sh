#!/usr/bin/env bash
# sMLP whose tokens choose experts by a table of their ids, with the recipe of Table 8
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_sparse smlp_hash "$@"
