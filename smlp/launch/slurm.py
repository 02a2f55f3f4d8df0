"""Read Slurm's environment variables: the tasks of a job or of a job step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from smlp.errors import UserError

# Ports below those of outgoing connections (Linux starts at 32768); their number is prime.
_FIRST_PORT, _NUM_PORTS = 15013, 16381
_MOST_DIGITS = 18  # Python refuses to read thousands
_MOST_TASKS = 1 << 20  # of a job, or hosts
_REMEDY = "start the ranks with torchrun, whose variables come first"


@dataclass(frozen=True)
class Tasks:
    """The tasks that srun starts, and which of them this process is.

    ``hosts`` and ``tasks_per_node`` are by node; ``node`` is the index of this process' node in them.
    """

    rank: int
    local_rank: int
    node: int
    hosts: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    job_id: int
    step_id: int
    #: how srun distributes tasks over nodes, as in --distribution
    distribution: str

    @property
    def world_size(self) -> int:
        """Tasks on all nodes."""
        return sum(self.tasks_per_node)

    def host_of_ranks(self) -> list[str]:
        """Return the host of each task in order, "?" if the distribution is neither block nor cyclic."""
        if not self.distribution.startswith(("block", "cyclic")):
            return ["?"] * self.world_size
        if self.distribution.startswith("block"):
            return [host for host, count in zip(self.hosts, self.tasks_per_node, strict=True) for _ in range(count)]
        rounds = range(max(self.tasks_per_node))
        nodes = list(zip(self.hosts, self.tasks_per_node, strict=True))
        return [host for number in rounds for host, count in nodes if count > number]


def tasks_of_step(environ: Mapping[str, str], is_interactive: bool) -> Tasks | None:
    """Return the tasks of the step in which srun started this process; None outside of a step, or for a single task.

    Variables such as SLURM_PROCID and SLURM_NTASKS do not tell a step: a batch script has them too, and so has a shell.

    Args:
        environ: environment variables.
        is_interactive: whether the process belongs to a terminal. In a step with one (``srun --pty``) only the first of
            the tasks does anything, and the user starts everything else by hand.

    Raises:
        UserError: variables contradict each other.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ or _number(environ, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    if is_interactive and "SLURM_PTY_PORT" in environ:
        return None
    tasks = Tasks(
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        node=_number(environ, "SLURM_NODEID"),
        hosts=expand_hosts(_text(environ, "SLURM_STEP_NODELIST")),
        tasks_per_node=expand_counts(_text(environ, "SLURM_STEP_TASKS_PER_NODE")),
        job_id=_number(environ, "SLURM_JOB_ID"),
        step_id=_number(environ, "SLURM_STEP_ID"),
        distribution=environ.get("SLURM_DISTRIBUTION", "block"),
    )
    announced = _number(environ, "SLURM_STEP_NUM_TASKS")
    consistent = announced == tasks.world_size and tasks.node < len(tasks.hosts) == len(tasks.tasks_per_node)
    if not consistent:  # for example a heterogeneous step, whose components are counted separately
        raise UserError(
            f"Slurm announces {announced} tasks, but SLURM_STEP_TASKS_PER_NODE has {tasks.world_size} and "
            f"SLURM_STEP_NODELIST {len(tasks.hosts)} hosts: {_REMEDY}"
        )
    if tasks.rank >= announced or tasks.local_rank >= tasks.tasks_per_node[tasks.node]:
        raise UserError(
            f"SLURM_PROCID is {tasks.rank} and SLURM_LOCALID {tasks.local_rank}, but there are {announced} tasks, "
            f"{tasks.tasks_per_node[tasks.node]} of them on this node: {_REMEDY}"
        )
    return tasks


def tasks_of_job(environ: Mapping[str, str]) -> Tasks | None:
    """Return the tasks that a plain ``srun`` would start in this batch script or allocation; None elsewhere.

    In a step of fewer nodes than its job the variables describe both, and the result is None as well.

    Raises:
        UserError: a variable is not what Slurm writes.
    """
    if not all(environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")):
        return None
    hosts = expand_hosts(environ["SLURM_JOB_NODELIST"])
    counts = expand_counts(environ["SLURM_TASKS_PER_NODE"])
    distribution = environ.get("SLURM_DISTRIBUTION", "block")
    if len(hosts) != len(counts):
        return None
    return Tasks(0, 0, 0, hosts, counts, _number(environ, "SLURM_JOB_ID"), 0, distribution)


def port_of(job_id: int, step_id: int) -> int:
    """Return a port for the ranks of a step: steps of one job get different ones, those of two jobs rarely the same."""
    return _FIRST_PORT + (131 * job_id + step_id) % _NUM_PORTS


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand Slurm's short form of a list of hosts: ``n[1-3,07],x`` to n1, n2, n3, n07, x.

    Raises:
        UserError: the text is not such a list.
    """
    numbers = r"\d{1,18}(-\d{1,18})?"
    entry = rf"([^][,\s]|\[{numbers}(,{numbers})*\])+"
    unreadable = f"cannot read the list of hosts {text!r} that Slurm gives: {_REMEDY}"
    if not re.fullmatch(f"{entry}(,{entry})*", text):
        raise UserError(unreadable)
    hosts: list[str] = []
    for host in re.findall(r"(?:[^][,]|\[[^]]*\])+", text):
        expanded = [""]
        for part in re.findall(r"\[[^]]*\]|[^][]+", host):
            choices = list(islice(_ranges(part[1:-1]), _MOST_TASKS + 1)) if part.startswith("[") else [part]
            if not choices:  # as of [3-1]
                raise UserError(unreadable)
            if len(hosts) + len(expanded) * len(choices) > _MOST_TASKS:
                raise UserError(f"the list {text[:80]!r} that Slurm gives has more than {_MOST_TASKS:,} hosts")
            expanded = [begun + choice for begun in expanded for choice in choices]
        hosts += expanded
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand Slurm's short form of numbers of tasks by node: ``4(x2),1`` to 4, 4, 1.

    Raises:
        UserError: the text is not such a list.
    """
    counts: list[int] = []
    total = 0
    for entry in text.split(","):
        found = re.fullmatch(r"([1-9]\d{0,8})(?:\(x([1-9]\d{0,8})\))?", entry)
        if found is None:
            raise UserError(f"cannot read the numbers of tasks by node {text!r} that Slurm gives")
        count, nodes = int(found[1]), int(found[2] or 1)
        total += count * nodes
        if total > _MOST_TASKS:
            raise UserError(f"the list {text[:80]!r} that Slurm gives has more than {_MOST_TASKS:,} tasks")
        counts += [count] * nodes
    return tuple(counts)


def _ranges(text: str) -> Iterable[str]:
    """Expand ``1-3,07`` to 1, 2, 3, 07; leading zeros are kept."""
    for entry in text.split(","):
        first, _, last = entry.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UserError(f"srun started this process, but {name} is not set")
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise UserError(f"{name} is {text!r}, not a number")
    return int(text)
