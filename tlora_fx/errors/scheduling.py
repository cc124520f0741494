"""Policies, their options, and the moments of a cluster that they are asked about."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError


class UnknownPolicy(TloraError):
    """A scheduling policy that does not exist.

    The message lists the policies that do. Other people's are found by the entry point group
    `tlora_fx.policies`.
    """

    code = "T0900"


class PolicyOptionWrong(TloraError):
    """A policy has no such option, or the option cannot have this value."""

    code = "T0901"


class TooManyForOracle(TloraError):
    """The exact policy was asked about more jobs than it can search.

    It looks at every subset of the jobs. Choose `tlora`, or fewer jobs.
    """

    code = "T0902"


class JobNotInState(TloraError):
    """The job that was asked about is not active in this state of the cluster."""

    code = "T0903"


class CreditRefused(TloraError):
    """A job would be slowed down past what it consented to lend.

    A defect, unless you call the ledger of credits yourself.
    """

    code = "T0904"
