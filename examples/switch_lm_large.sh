#!/usr/bin/env bash
# Switch Transformer: 7 dense and 7 sparse layers, 32 experts (Table 5), with the recipe of Table 10
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
large switch_lm_large "$@"
