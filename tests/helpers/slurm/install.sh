#!/usr/bin/env bash
# Installs Slurm for tests/launch/test_slurm.py where that can be done: Debian's packages, as root. Nothing is configured or left
# running on purpose; the tests bring a cluster of their own. Exit status 3 and the reason on standard output where not.
set -uo pipefail
PATH="$PATH:/usr/sbin:/sbin"
PROGRAMS=(munged slurmctld slurmd sbatch srun)
PACKAGES=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge)

cannot() {
    echo "$1"
    exit 3
}

absent() {
    local program
    for program in "${PROGRAMS[@]}"; do
        command -v "$program" >/dev/null || echo "$program"
    done
}

[ "$(uname)" = Linux ] || cannot "Slurm needs Linux"
[ "$(id -u)" = 0 ] || cannot "slurmd needs root"
[ -w /etc/hosts ] || cannot "/etc/hosts cannot be written, and the nodes need names"
[ -n "$(absent)" ] || exit 0
command -v apt-get >/dev/null || cannot "there is no apt-get here to install Slurm with"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { timeout 120 apt-get update && timeout 300 apt-get install -y --no-install-recommends "${PACKAGES[@]}"; } >"$log" 2>&1; then
    cannot "apt-get cannot install Slurm: $(grep -v '^ *$' "$log" | tail -n 1)"
fi
[ -z "$(absent)" ] || cannot "the packages ${PACKAGES[*]} lack $(absent | xargs)"
