#!/usr/bin/env bash
# Hash layers: 8 dense and 8 sparse layers, 32 experts (Table 5), with the recipe of Table 10
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
large hash_lm_large "$@"
