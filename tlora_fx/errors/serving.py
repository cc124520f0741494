"""The service over a run, and its clients."""

from __future__ import annotations

from tlora_fx.errors.root import TloraError, printable


class ServiceRefused(TloraError, code="T0980"):
    """`tlora-fx serve` or `tlora-fx tokens` refuses what was asked.

    An example is a service that is open to a network without access tokens. The message says what
    to change.
    """


class TokenRefused(TloraError, code="T0981"):
    """A request came without an access token, or with one that is unknown or revoked."""


class SubmissionRefused(TloraError, code="T0982"):
    """A submission is invalid.

    Its job file has mistakes, it names a path that jobs may not read, or an upload is missing.
    """


class RequestConflict(TloraError, code="T0983"):
    """A request conflicts with the present state of the service.

    The key belongs to another submission, the name is taken, or the job has ended or has no
    adapter. The name of a job that was refused, cancelled or removed is free once no group runs in
    a process in which the job was.
    """


class QuotaReached(TloraError, code="T0984"):
    """A request exceeds a limit of the user: jobs, GPU-hours, stored bytes, or priority."""


class UploadRefused(TloraError, code="T0985"):
    """A file to upload is too large, is not there, or cannot be read."""


class JobUnknown(TloraError, code="T0986"):
    """The user has no job of that name on this service."""


class ServiceUnreachable(TloraError, code="T0987"):
    """No service answers at the address.

    Set `--server` or TLORA_FX_SERVER.
    """


class RequestRefused(TloraError, code="T0988"):
    """A request has invalid parameters, or the service failed."""


class RequestGone(TloraError, code="T0990"):
    """A session is over, or a future is not known any more.

    A session ends when its client finishes it, or sends no sign of life for an hour. The client
    repeats the request, or begins a new session.
    """


class CommandRefused(TloraError, code="T0991"):
    """A request of a training client asks for what the service cannot do.

    It is the answer to that request alone; the model is as it was before. The message says what to
    ask for instead.
    """


class QueueFull(TloraError, code="T0992"):
    """Too many requests of training clients wait, or they take too many bytes.

    Send the request again, unchanged, once some of those before it were answered. The Tinker SDK
    does so by itself. The operator sets the bounds with `serve --tinker-waiting`.
    """


class AnswerRefused(TloraError, code="T0989"):
    """The service refused a request of the client.

    The message is that of the service, with its own code.
    """

    def render(self) -> str:
        """The service's own words."""
        return printable(self.what)
