"""`tlora-fx client`: the commands of a service's users; none of them needs torch."""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import tarfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlora_fx.cli.arguments.options import JobFilePath, command_group, option, takes_options
from tlora_fx.cli.terminal import Console, bare_table, echo, print_whole
from tlora_fx.config.job_file import read_bounded, read_yaml
from tlora_fx.config.paths import is_file, with_home
from tlora_fx.errors import (
    AnswerRefused,
    RunFolderError,
    ServiceUnreachable,
    TloraError,
    TokenRefused,
    UploadRefused,
)
from tlora_fx.host.environment import AUTHORITY, SERVER, TOKEN
from tlora_fx.server.log_lines import SERVICE_ENDING, TOKEN_GONE

if TYPE_CHECKING:
    import httpx

group = command_group("Submit jobs to a service; list, pause, cancel and fetch them.")
#: What is tried again where the service is gone for a moment.
TRIES, PAUSE_SECONDS, KEY = 5, 0.5, "Idempotency-Key"
#: Fields of a job that are seconds since 1970.
TIMES = ("submitted", "started", "ended")
#: Jobs that are asked for at a time.
PAGE = 1000

Job = Annotated[
    str, typer.Argument(help="Name of the job, with or without its user's name in front.")
]
Plain = Annotated[bool, typer.Option("--json", help="Print the answer of the service as JSON.")]


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options that say which service is asked, and who asks."""

    server: str = option("http://127.0.0.1:8642", "URL of the service.", envvar=SERVER)
    token: str | None = option(
        None, "Your access token; better set by the environment variable.", envvar=TOKEN
    )
    authority: str | None = option(
        None, "CA certificate (PEM file) to trust for HTTPS.", envvar=AUTHORITY
    )


class Connection:
    """A service, as one command speaks to it."""

    def __init__(self, service: ServiceOptions) -> None:
        try:
            import httpx
        except ImportError:
            raise ServiceUnreachable(
                "the client needs httpx", help="pip install 'tlora-fx[serve]'"
            ) from None
        self.server = service.server.rstrip("/")
        # A token that was read from a file may have the end of its line.
        token = (service.token or "").strip()
        if token and not re.fullmatch(r"[!-~]+", token):
            raise TokenRefused(
                "this is no access token",
                expected="what `tlora-fx tokens add` printed: letters, digits, '-' and '_'",
                help="set TLORA_FX_TOKEN or --token",
            )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        file = service.authority and with_home(service.authority)
        try:
            verify = ssl.create_default_context(cafile=file) if file else True
            self.client = httpx.Client(
                base_url=self.server, headers=headers, verify=verify, timeout=60.0
            )
        except httpx.InvalidURL as error:
            raise self._unreachable(error) from error
        except OSError as error:
            raise ServiceUnreachable(
                "the certificate to trust cannot be read",
                file=file or "that of SSL_CERT_FILE",
                expected="certificates in PEM form",
                found=error.strerror or error,
                help=f"correct --authority, {AUTHORITY} or SSL_CERT_FILE",
            ) from error

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Ask the service, and return its JSON; raises ServiceUnreachable, AnswerRefused.

        body   what makes the content, anew for each try
        """
        import httpx

        # Others may have been done though no answer came.
        repeatable = method != "POST" or KEY in more.get("headers", ())
        for left in reversed(range(TRIES)):
            if body is not None:
                more["content"] = body()
            try:
                response = self.client.request(method, f"/api/v1/{path}", **more)
                self._require(response, "application/json")
                return response.json() if response.content else None
            except httpx.HTTPError as error:
                away = isinstance(error, httpx.TransportError if repeatable else httpx.ConnectError)
                if not (left and away):
                    raise self._unreachable(error) from error
                time.sleep(PAUSE_SECONDS)
        raise AssertionError("the last try returns or raises")

    def pages(self, path: str, params: dict[str, Any]) -> Iterator[Any]:
        """All jobs of a list, which the service answers a page at a time."""
        after = 0
        while True:
            page = self.ask("GET", path, params={**params, "after": after, "limit": PAGE})
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1]["number"]

    @contextmanager
    def stream(self, path: str, kind: str, **more: Any) -> Iterator[httpx.Response]:
        """An answer that comes bit by bit.

        kind     its media type
        raises   ServiceUnreachable, AnswerRefused
        """
        import httpx

        try:
            with self.client.stream("GET", f"/api/v1/{path}", timeout=None, **more) as response:
                self._require(response, kind)
                yield response
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _require(self, response: httpx.Response, kind: str) -> None:
        """Refuse an answer that is an error, or is of another kind than the service would give."""
        import httpx

        told = response.headers.get("content-type", "")
        if response.status_code == httpx.codes.NO_CONTENT:
            return
        if response.is_success and told.startswith(kind):
            return
        if response.is_error:
            response.read()
            with suppress(ValueError, KeyError, TypeError):
                raise AnswerRefused(str(response.json()["text"]))
        if response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
            raise UploadRefused(
                "a proxy before the service refuses what is sent as too large",
                server=self.server,
                help="ask the operator to raise its limit, such as client_max_body_size",
            )
        raise ServiceUnreachable(
            "what answers is no service of tlora-fx",
            server=self.server,
            found=f"{response.status_code} {response.reason_phrase}, {told or 'no content'}",
        )

    def _unreachable(self, error: Exception) -> ServiceUnreachable:
        is_address = self.server.startswith(("http://", "https://"))
        start = "start one with `tlora-fx serve`, or set --server or TLORA_FX_SERVER"
        return ServiceUnreachable(
            "no service answers",
            server=self.server,
            reason=f"{type(error).__name__}: {error}",
            help=start if is_address else "write the address in full, such as http://HOST:8642",
        )


@group.command("submit")
@takes_options
def submit(
    service: ServiceOptions,
    job_file: JobFilePath,
    upload: list[str] | None = option(
        None,
        "File to upload that the job file names: FILE, as the job file names it or from here, or "
        "NAME=FILE if it is called NAME there; repeatable.",
    ),
    priority: int = option(0, "Priority of the jobs; higher ones are started first.", min=0),
    key: str | None = option(
        None, "Idempotency key: submitting again with the same key creates no second job."
    ),
) -> None:
    """Submit the jobs of a file to the service."""
    text = read_bounded(job_file).decode("utf-8", "surrogateescape")
    connection = Connection(service)
    there = uploads(job_file, upload or [])
    files = {name: _upload(connection, path) for name, path in there.items()}
    body = json.dumps({"job_file": text, "files": files, "priority": priority})
    headers = {KEY: key or str(uuid.uuid4()), "Content-Type": "application/json"}
    try:
        taken = connection.ask("POST", "submissions", content=body, headers=headers)
    except AnswerRefused as refused:
        # The service calls every job file the same; its user does not.
        raise AnswerRefused(_of_file(refused.what, job_file)) from None
    again = " (submitted before)" if taken["replayed"] else ""
    echo(f"submission {taken['submission']}: {', '.join(taken['jobs'])}{again}")


def _of_file(text: str, job_file: Path) -> str:
    """What the service says of a line of a job file, with the file's own name."""
    return re.sub(r"^(  file +)jobs\.yaml(?=:|$)", rf"\1{job_file.name}", text, flags=re.MULTILINE)


# A job file names data relative to its own folder, wherever a command is given. A user names a file
# as the job file does, or as their shell completes it.


def uploads(job_file: Path, specs: list[str]) -> dict[str, Path]:
    """The files to upload by their names in the job file.

    specs    FILE, or NAME=FILE; FILE is looked for below the job file's folder and from here
    raises   UploadRefused where there is none, or two
    """
    named = sorted(set(_texts(job_file)))
    files = {}
    for spec in specs:
        name, equals, source = spec.partition("=")
        path = _find(job_file, Path(source if equals else spec))
        files[_normal(name) if equals else _name_of(job_file, path, spec, named)] = path
    return files


def _find(job_file: Path, written: Path) -> Path:
    """The file that a user means."""
    beside = job_file.parent / written
    there = [path for path in (beside, written) if is_file(path)]
    if not there:
        folders = dict.fromkeys((job_file.parent.absolute(), Path.cwd()))
        raise UploadRefused(
            "there is no such file to upload",
            file=written,
            expected=f"a file below {' or '.join(map(str, folders))}",
            help="name one that is there: --upload FILE, or --upload NAME=FILE",
        )
    if len(there) == 2 and not beside.samefile(written):
        raise UploadRefused(
            "two files are called so",
            file=written,
            found=f"{beside.absolute()} and {written.absolute()}",
            help=f"say which one the job file means: --upload {written}={beside.absolute()}",
        )
    return there[0]


def _name_of(job_file: Path, path: Path, written: str, named: list[str]) -> str:
    """What the job file calls a file: by its place, else by its last name alone."""
    real, folder = path.resolve(), job_file.parent.resolve()
    for name in named:
        if _is_below(name) and (folder / name).resolve() == real:
            return _normal(name)
    if real.is_relative_to(folder):
        return real.relative_to(folder).as_posix()
    alike = [name for name in named if _is_below(name) and PurePosixPath(name).name == path.name]
    if len(alike) == 1:
        return _normal(alike[0])
    return _normal(written) if _is_below(written) else path.name


def _is_below(name: str) -> bool:
    """Whether a text may name an uploaded file: a path below the job file."""
    path = PurePosixPath(name)
    return "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _normal(name: str) -> str:
    return PurePosixPath(name).as_posix()


def _texts(job_file: Path) -> Iterator[str]:
    """All texts in a job file; none where it is no YAML, which the service tells."""
    try:
        left = [read_yaml(job_file).value]
    except TloraError:
        return
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value


def _upload(connection: Connection, path: Path) -> str:
    """Upload a file; its SHA-256."""
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        connection.ask("PUT", f"files/{sha256}", lambda: path.open("rb"), timeout=None)
    except OSError as error:
        raise UploadRefused("a file cannot be read", file=path, found=error.strerror) from error
    return sha256


@group.command("ls")
@takes_options
def ls(
    service: ServiceOptions,
    state: str | None = option(None, "List only jobs in this state."),
    last: int | None = option(
        None, "List only so many jobs, those submitted last; all if not given.", min=1, max=PAGE
    ),
    plain: Plain = False,
) -> None:
    """List your jobs, or the jobs of all users if you are an admin."""
    params: dict[str, Any] = {"state": state} if state else {}
    connection = Connection(service)
    if last is None:
        rows = list(connection.pages("jobs", params))
    else:
        params |= {"before": (1 << 62) - 1, "limit": last}
        rows = connection.ask("GET", "jobs", params=params)[::-1]
    if plain:
        echo(json.dumps(rows, indent=1))
        return
    unit = _unit(connection)
    table = bare_table("job", "state", "step", "loss", "tokens/s", unit, "submitted")
    for row in rows:
        shown = (row["loss"], ".4f"), (row["tokens_per_second"], ".0f")
        numbers = ("" if value is None else format(value, form) for value, form in shown)
        gpus = ",".join(map(str, row["gpus"]))
        step = f"{row['step']}/{row['steps'] or '?'}"
        at = _time(row["submitted"], "%Y-%m-%d %H:%M")
        table.add_row(row["name"], row["state"], step, *numbers, gpus, at)
    print_whole(Console(highlight=False), table)


@group.command("status")
@takes_options
def status(
    service: ServiceOptions,
    job: Job,
    why: bool = option(
        False, "Also explain why the scheduler runs the job as it does, or lets it wait."
    ),
    plain: Plain = False,
) -> None:
    """Show the state of a job."""
    connection = Connection(service)
    told = connection.ask("GET", f"jobs/{job}")
    if plain:
        echo(json.dumps(told, indent=1))
    else:
        for name, value in told.items():
            if value not in (None, "", []):
                title = f"{_unit(connection).lower()}s" if name == "gpus" else name
                echo(f"{title:<18} {_shown(name, value)}")
    if why:
        echo(connection.ask("GET", f"jobs/{job}/explain")["text"])


def _unit(connection: Connection) -> str:
    """What the groups of the service hold: GPUs, or parts of a CPU."""
    return "CPU" if connection.ask("GET", "overview")["gpu"] == "cpu" else "GPU"


def _shown(name: str, value: object) -> str:
    """A field of a job as people read it."""
    if name == "steps" and value == 0:
        return "not known yet"
    if name in TIMES and isinstance(value, int | float):
        return _time(value, "%Y-%m-%d %H:%M:%S %Z")
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _time(seconds: float, form: str) -> str:
    """Seconds since 1970 as a time of this machine's zone."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime(form)


def _verb(verb: str, told: str) -> None:
    def change(
        service: ServiceOptions,
        jobs: Annotated[list[str], typer.Argument(help="Names of the jobs.")],
    ) -> None:
        connection = Connection(service)
        for job in jobs:
            answer = connection.ask("POST", f"jobs/{job}/{verb}")
            echo(f"{answer['name']}: {answer['state']}")

    change.__doc__ = told
    group.command(verb)(takes_options(change))


_verb("cancel", "End jobs early; adapters trained so far are kept.")
_verb("pause", "Pause jobs; no step is lost.")
_verb("resume", "Resume paused jobs.")


@group.command("rm")
@takes_options
def rm(
    service: ServiceOptions,
    jobs: Annotated[list[str], typer.Argument(help="Names of the jobs.")],
) -> None:
    """Remove jobs that have ended, with their adapters and metrics; `fetch` what you need first."""
    connection = Connection(service)
    for job in jobs:
        connection.ask("DELETE", f"jobs/{job}")
        echo(f"{job}: removed")


@group.command("logs")
@takes_options
def logs(
    service: ServiceOptions,
    job: Job,
    follow: bool = option(
        False, "Keep printing new lines until the job has ended.", "-f", "--follow"
    ),
) -> None:
    """Print the metrics of a job's steps and evaluations."""
    connection = Connection(service)
    line = ""
    path, kind = f"jobs/{job}/logs", "text/plain"
    with connection.stream(path, kind, params={"follow": follow}) as response:
        for line in response.iter_lines():
            echo(line)
    # The last line; whoever waits for the end of the job must not take this for it.
    if line.endswith(SERVICE_ENDING):
        raise ServiceUnreachable(
            "the service ended before the job did",
            server=connection.server,
            help="follow the log again once the service is back: it goes on with the job",
        )
    if line.endswith(TOKEN_GONE):
        raise TokenRefused("the token was revoked before the job ended", help="ask for a new one")


@group.command("fetch")
@takes_options
def fetch(
    service: ServiceOptions,
    job: Job,
    output: Path = option(Path(), "Folder to put the job's folder into.", "-o", "--output"),
) -> None:
    """Download the adapter (PEFT) and the metrics of a finished job.

    Files that are there already, and hold something else, are not overwritten.
    """
    connection = Connection(service)
    path, kind = f"jobs/{job}/adapter", "application/x-tar"
    with connection.stream(path, kind) as response, TemporaryFile() as file:
        for chunk in response.iter_bytes():
            file.write(chunk)
        file.seek(0)
        with tarfile.open(fileobj=file) as tar:
            names = sorted({Path(name).parts[0] for name in tar.getnames()})
            _unpack(tar, output)
    echo("\n".join(str(output / name) for name in names))


def _unpack(tar: tarfile.TarFile, output: Path) -> None:
    """Put what an archive holds into a folder; raises RunFolderError before a file is changed."""
    from tlora_fx.runtime.run_folder import unwritable

    try:
        for member in filter(tarfile.TarInfo.isfile, tar.getmembers()):
            path, content = output / member.name, tar.extractfile(member)
            if content is not None and path.exists() and path.read_bytes() != content.read():
                raise RunFolderError(
                    "the folder holds another file of that name",
                    file=path,
                    help="remove or rename it, or choose another folder with -o",
                )
        tar.extractall(output, filter="data")
    except OSError as error:
        raise unwritable(output, error) from error
