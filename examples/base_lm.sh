#!/usr/bin/env bash
# BASE layers: 11 dense and 12 sparse layers, 32 experts (Table 8)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_sparse base_lm "$@"
