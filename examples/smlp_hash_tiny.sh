#!/usr/bin/env bash
# sMLP whose tokens choose experts by a table of their ids, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny smlp_hash_tiny "$@"
