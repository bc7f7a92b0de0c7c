"""The command line: ``precision-shim`` and ``python -m precision_shim``.

Each sub-command is a module of this package with a function ``register(app)`` that adds its
command to the typer application. Such a module is cheap to import (typer, the standard library):
torch, a framework or matplotlib are imported when the command runs, so that ``run`` starts a job
without paying for ``demo``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["COMMANDS", "build_app", "main"]

COMMANDS = ("run", "doctor", "demo")
"""The modules of this package that hold a command, in the order of ``--help``."""

MISSING_EXTRA = (
    "precision-shim: the command line needs typer and rich: pip install 'precision-shim[cli]'"
)


def build_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """The typer application.

    Args:
        commands: the commands to register; their modules are imported.

    Raises:
        ImportError: typer or rich is not installed.
    """
    import rich  # noqa: F401  (typer alone would start, and fail at the first table)
    import typer

    app = typer.Typer(
        name="precision-shim",
        help="Precision behaviour for RL post-training frameworks, without forking them.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    ) -> None:
        if version:
            import precision_shim

            typer.echo(f"precision-shim {precision_shim.__version__}")
            raise typer.Exit

    for name in commands:
        importlib.import_module(f"{__name__}.{name}").register(app)
    return app


def main() -> None:
    """The entry point of ``precision-shim``."""
    try:
        # A job's start does not pay for the commands that it does not use.
        app = build_app([name for name in COMMANDS if name in sys.argv[1:2]] or COMMANDS)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"typer", "rich", "click"}:
            raise
        print(MISSING_EXTRA, file=sys.stderr)
        raise SystemExit(2) from None
    app(prog_name="precision-shim")
