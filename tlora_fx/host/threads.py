"""Threads that compute on CPUs: how many there may be, and how they wait for each other.

OpenMP's threads spin while they wait. Where other processes want the same CPUs, a thread that spins
takes the time that the one it waits for needs. OpenMP reads its variables when torch is imported,
so the command line sets them before. It does so for itself alone: programs that import tlora_fx
have the variables and threads that they choose.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from tlora_fx.host.memory import usable_cpus

#: Variables by which users say how many threads there are.
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WAIT_POLICY = "OMP_WAIT_POLICY"
#: Variables by which users say how threads wait: OpenMP's own, GNU's and Intel's.
WAITS = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


class ThreadRules:
    """Rules of this process for its threads.

    adapts   whether commands may choose a number of threads: our command line runs, and its user
             has not said how many
    """

    def __init__(self) -> None:
        self.adapts = False

    def set_up(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Set OpenMP's variables, where the user has not, for this process and those it starts.

        Threads wait without spinning. Where a container has less CPU time than there are CPUs,
        which OpenMP does not see, there are as many threads as that allows.
        """
        if not any(environment.get(name) for name in WAITS):
            environment[WAIT_POLICY] = "passive"
        self.adapts = not any(environment.get(name) for name in COUNTS)
        cpus = usable_cpus()
        if self.adapts and cpus < len(os.sched_getaffinity(0)):
            environment["OMP_NUM_THREADS"] = str(cpus)


thread_rules = ThreadRules()
