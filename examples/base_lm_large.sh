#!/usr/bin/env bash
# BASE layers: 8 dense and 8 sparse layers, 32 experts (Table 10)
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
large base_lm_large "$@"
