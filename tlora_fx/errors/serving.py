"""The service over a run, and its clients."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError, printable


class ServiceRefused(TloraError, code="T0980"):
    """`tlora-fx serve` does not start like this, such as open to a network without tokens."""


class TokenRefused(TloraError, code="T0981"):
    """A request came without a token of the service, or with one that is unknown or revoked."""


class SubmissionRefused(TloraError, code="T0982"):
    """A submission is wrong: its job file, a path outside what jobs may read, a missing upload."""


class RequestConflict(TloraError, code="T0983"):
    """A request does not go with what is there.

    A key that another submission had, a name that is taken, a job that has ended or has no adapter.
    """


class QuotaReached(TloraError, code="T0984"):
    """A user has as many jobs, GPU-hours or stored bytes as allowed, or no such priority."""


class UploadRefused(TloraError, code="T0985"):
    """A request's body is too large, or is not what its SHA-256 says."""


class JobUnknown(TloraError, code="T0986"):
    """The user has no job of that name on this service."""


class ServiceUnreachable(TloraError, code="T0987"):
    """No service answers at the address; set `--server` or TLORA_FX_SERVER."""


class RequestRefused(TloraError, code="T0988"):
    """A request has parameters that the service does not read, or the service failed."""


class AnswerRefused(TloraError, code="T0989"):
    """A service refused what a client asked; the message is its own, with its own code."""

    def render(self) -> str:
        """The service's own words."""
        return printable(self.what)
