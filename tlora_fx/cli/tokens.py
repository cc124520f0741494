"""`tlora-fx tokens`: who may use a service, and how much of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from tlora_fx.cli.arguments.options import command_group, option, takes_options
from tlora_fx.cli.terminal import Console, bare_table, print_whole
from tlora_fx.errors import ServiceRefused
from tlora_fx.runtime.run_folder import LEDGER, RUN_COMMAND_FILES, require_new
from tlora_fx.scheduler.folder_kind import require_folder_of_service
from tlora_fx.server.ledger import LOCAL, User
from tlora_fx.server.store import ServiceStore

group = command_group("Create, list and revoke the access tokens of a service.")
RunFolder = Annotated[
    Path,
    typer.Option(
        "-o", "--output", help="Output folder of the service: the -o of `tlora-fx serve`."
    ),
]


@group.command("add")
@takes_options
def add(
    name: Annotated[str, typer.Argument(help="Name of the user: small letters, digits and '-'.")],
    output: RunFolder,
    admin: bool = option(False, "Let the user see and change the jobs of all users."),
    jobs: int | None = option(
        None,
        "How many jobs the user may have at a time, running or waiting; no limit if not given.",
        min=0,
    ),
    gpu_hours: float | None = option(
        None, "How many GPU-hours the user may use in all; no limit if not given.", min=0
    ),
    priority: int = option(0, "Highest priority that the user may give a job.", min=0, max=1000),
) -> None:
    """Create an access token for a user, and set the user's limits.

    The token is printed once and cannot be shown again. Earlier tokens of the user stay valid; the
    new limits apply to all of them. Limits and --admin that are not given again are removed.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", name) or name == LOCAL:
        raise ServiceRefused(
            "a user cannot be called so",
            found=name,
            expected=f"small letters, digits and '-', and not '{LOCAL}'",
        )
    require_folder_of_service(output)
    if not (output / LEDGER).exists():
        # As `serve`, which begins in a new folder: what lies in another one is no service's.
        require_new(output, among=RUN_COMMAND_FILES)
    typer.echo(ServiceStore(output).add_user(User(name, admin, jobs, gpu_hours, priority)))


@group.command("ls")
def ls(output: RunFolder) -> None:
    """List users, their limits, and the GPU-hours they have used."""
    store = _store_of(output)
    table = bare_table("user", "tokens", "admin", "jobs", "GPU-hours", "used", "priority")
    for user, tokens in store.users().items():
        limits = ("any" if limit is None else f"{limit:g}" for limit in (user.jobs, user.gpu_hours))
        used = f"{store.gpu_hours(user.name):.2f}"
        admin = "yes" if user.admin else ""
        table.add_row(user.name, str(tokens), admin, *limits, used, str(user.priority))
    print_whole(Console(highlight=False), table)


@group.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the user.")], output: RunFolder
) -> None:
    """Revoke all tokens of a user; jobs of the user go on."""
    count = _store_of(output).revoke(name)
    if not count:
        raise ServiceRefused("the user has no token", found=name, help="see `tlora-fx tokens ls`")
    typer.echo(f"{name}: {count} revoked")


def _store_of(output: Path) -> ServiceStore:
    """What a service keeps of its users; raises ServiceRefused where none was in this folder."""
    if not (output / LEDGER).is_file():
        raise ServiceRefused(
            "there is no service in this folder",
            folder=output,
            expected="the -o folder of `tlora-fx serve`, or one in which `tokens add` made a user",
            help="name it by -o",
        )
    require_folder_of_service(output)
    return ServiceStore(output)
