#!/usr/bin/env bash
# Transformer: 24 layers (Table 9)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_dense dense_lm "$@"
