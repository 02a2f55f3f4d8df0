# shellcheck shell=bash
# Settings of the cluster. Sourced by submit.sh on the login node and by every job on its first node; exported variables
# reach all ranks. Lines that you should check begin with "ADAPT"; partition and account are in the .sbatch files.

# ADAPT: modules with Python or CUDA libraries, if your cluster has them
# module load cuda/12.4

# ADAPT: the network between nodes, if ranks do not find each other (docs/slurm.md); `ip -brief address` lists the names
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# ADAPT: the virtual environment, if it is neither active when you submit nor .venv in the clone
# SMLP_VENV=/shared/me/smlp-venv

if [ -z "${SMLP_VENV:-}" ] && ! command -v smlp >/dev/null; then
    SMLP_VENV="$SMLP_ROOT/.venv"
fi
if [ -n "${SMLP_VENV:-}" ]; then
    [ -f "$SMLP_VENV/bin/activate" ] || fail "no virtual environment at $SMLP_VENV: see docs/slurm.md, or set SMLP_VENV"
    # shellcheck source=/dev/null
    source "$SMLP_VENV/bin/activate"
fi
command -v smlp >/dev/null || fail "smlp is not installed in the environment at ${SMLP_VENV:-$(command -v python3)}"
