#!/usr/bin/env bash
# GShard: 9 dense and 9 sparse layers, 64 experts, with the recipe of Table 8
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
small_sparse gshard_lm "$@"
