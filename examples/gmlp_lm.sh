#!/usr/bin/env bash
# gMLP: 41 blocks (Table 9)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_dense gmlp_lm "$@"
