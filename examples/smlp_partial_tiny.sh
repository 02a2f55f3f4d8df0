#!/usr/bin/env bash
# sMLP, features routed by the first 20 % of the tokens, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny smlp_partial_tiny "$@"
