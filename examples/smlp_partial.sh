#!/usr/bin/env bash
# sMLP, features routed by the first 20 % of the tokens (section 3.2.2), with the recipe of Table 8
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_sparse smlp_partial "$@"
