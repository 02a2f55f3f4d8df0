#!/usr/bin/env bash
# GShard: 7 dense and 7 sparse layers, 64 experts (Table 5), with the recipe of Table 10
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
large gshard_lm_large "$@"
