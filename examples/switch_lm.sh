#!/usr/bin/env bash
# Switch Transformer: 12 dense and 12 sparse layers, 32 experts, with the recipe of Table 8
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_sparse switch_lm "$@"
