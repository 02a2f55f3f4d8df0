#!/usr/bin/env bash
# Switch Transformer - Enlarge: 8 dense and 8 sparse layers (Table 5), with the recipe of Table 10
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
large switch_lm_enlarged "$@"
