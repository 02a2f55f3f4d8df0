#!/usr/bin/env bash
# sMLP with Switch's router of tokens, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny smlp_switch_tiny "$@"
