"""The loop, the simulated clock and the replay of traces."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class SubmittedTwice(TloraError):
    """A job was submitted under a name that the loop knows already.

    Names are what jobs are told apart by; give each its own.
    """

    code = "T0970"


class DecisionWrong(TloraError):
    """A policy decided what cannot be run.

    Each job may be in one group at most, groups may not share a GPU, GPUs must be there, and all
    jobs of a group need one base. This is a mistake of the policy.
    """

    code = "T0971"


class ReplayStalled(TloraError):
    """Jobs wait in a replay, nothing runs, and the policy starts none of them.

    This is a mistake of the policy: every job that is let in can run alone on the cluster.
    """

    code = "T0972"


class ReplayOptionWrong(TloraError):
    """An option of a replay cannot have this value, such as a horizon of no seconds."""

    code = "T0973"


class ClockBackwards(TloraError):
    """A simulated clock was asked to go back.

    This is a mistake of whoever turns it.
    """

    code = "T0974"
