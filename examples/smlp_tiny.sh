#!/usr/bin/env bash
# sMLP, features routed deterministically, for a laptop
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"
tiny smlp_tiny "$@"
