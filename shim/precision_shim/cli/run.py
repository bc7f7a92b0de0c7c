"""``precision-shim run -- COMMAND``: a job with the shim on, in it and in all its children.

It sets the variables and becomes the command: same process id, signals and exit status, nothing of
ours in between. What it can reach is what the start-up file and Ray's runtime_env reach.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .. import _settings
from .._settings import FEATURES, PREFIX, TABLE
from ..errors import SettingsError

__all__ = ["register", "run", "variables"]


def register(app: typer.Typer) -> None:
    """Add ``run`` to ``app``."""
    app.command(
        "run",
        context_settings={"allow_interspersed_args": False},  # the command's options are its own
        help=(
            "Run COMMAND with the shim on in it and in all its children: "
            "precision-shim run --strict -- python -m verl.trainer.main_ppo ..."
        ),
    )(run)


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", show_default=False)],
    features: Annotated[
        str | None,
        typer.Option(help=f"Comma list of {', '.join(FEATURES)}; -NAME takes one away from all."),
    ] = None,
    frameworks: Annotated[str | None, typer.Option(help="Comma list of frameworks.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="What cannot be patched is an error in the job.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help=f"One of {', '.join(TABLE)}."),
    ] = None,
) -> None:
    """Set the variables and execute the command in this process."""
    try:
        off = _settings.switch() == "off"
        ours = variables(
            features=features, frameworks=frameworks, strict=strict, settings=settings or []
        )
    except SettingsError as error:
        typer.echo(f"precision-shim run: {error}", err=True)
        raise typer.Exit(2) from None
    if off:
        # The operator's kill switch outranks a command line, as it outranks install().
        typer.echo(
            f"precision-shim run: {PREFIX}={os.environ[PREFIX]} is set: the command runs without "
            "the shim",
            err=True,
        )
    else:
        os.environ.update(ours)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:  # the shells' statuses
        typer.echo(f"precision-shim run: {command[0]}: {error.strerror}", err=True)
        raise typer.Exit(127 if isinstance(error, FileNotFoundError) else 126) from None


def variables(
    *, features: str | None, frameworks: str | None, strict: bool, settings: list[str]
) -> dict[str, str]:
    """The variables that options come to.

    Raises:
        SettingsError: a name or value makes no sense.
    """
    given: dict[str, object] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(
                f"--set {text!r} is not NAME=VALUE; allowed names: {', '.join(TABLE)}."
            )
        given[name.strip().lower().replace("-", "_")] = value
    from .._registry import entries

    resolved = _settings.resolve(
        features=features,
        frameworks=frameworks,
        strict=strict or None,
        settings=given,
        known_frameworks=entries(),
    )
    return {**resolved.given, PREFIX: "strict" if resolved.strict else "1"}
