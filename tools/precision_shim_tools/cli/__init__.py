"""The command line: ``precision-shim`` and ``python -m precision_shim``.

Each command is a module with the texts ``HELP`` (one sentence) and ``MORE`` of its help, a function
``options``, which adds its options to a parser, and a function ``run`` from the parsed arguments to
the exit status. ``run`` may raise a ``PrecisionShimError`` or an ``OSError``: exit status 2. Only a
running command imports torch, frameworks or matplotlib. Only ``demo`` needs a clone and more than
the base install.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ._output import Progress, fitted, write

__all__ = ["COMMANDS", "OPTIONS", "build_parser", "main", "settings_of"]

COMMANDS = ("run", "doctor", "plan", "audit", "checkpoint", "demo")
"""The modules of this package that implement a command, in the order of ``--help``."""

OPTIONS = {"features": "--features", "frameworks": "--frameworks", "settings": "--set"}
"""Maps an argument of ``install()`` to its command line option, for the messages of ``resolve``."""


def build_parser(commands: Sequence[str] = COMMANDS) -> _Parser:
    """Build the parser of the command line; the module of each command is imported."""
    import precision_shim

    parser = _Parser(
        prog="precision-shim",
        description="Precision behaviour for RL post-training frameworks, without forking them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"precision-shim {precision_shim.__version__}",
        help="print the version and exit",
    )
    parser.set_defaults(command=None, parser=parser, any_options=False)
    added = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in commands:
        module = importlib.import_module(f"{__name__}.{name}")
        command = added.add_parser(
            name, help=module.HELP, description=module.HELP, epilog=module.MORE, allow_abbrev=False
        )
        command.set_defaults(command=module.run, parser=command, alone=len(commands) == 1)
        module.options(command)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser for option values that begin with a dash, as in ``--features -fp16-scaling``."""

    as_json = False
    """Whether ``--json`` is among the words."""

    def error(self, message: str) -> NoReturn:
        """See ``ArgumentParser``; with ``--json`` the error is also a JSON object."""
        if self.as_json:
            write(json.dumps({"error": message}))
        self.print_usage(sys.stderr)
        self.exit(2, fitted(f"{self.prog}: error: {message}\n", sys.stderr))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._join(args or ()), namespace)

    def _join(self, words: Sequence[str]) -> list[str]:
        joined: list[str] = []
        rest = iter(words)
        for word in rest:
            option = self._option_string_actions.get(word)
            self.as_json |= word == "--json"
            if option is None and (word == "--" or not word.startswith("-")):
                return [*joined, word, *rest]
            value = next(rest, None) if option is not None and option.nargs is None else None
            joined.append(word if value is None else f"{word}={value}")
        return joined


def settings_of(texts: Sequence[str]) -> dict[str, object]:
    """Convert ``--set NAME=VALUE`` options to the dict for ``install(settings=...)``.

    Raises:
        SettingsError: a text is not NAME=VALUE. ``resolve`` checks names and values later.
    """
    from precision_shim.errors import SettingsError
    from precision_shim.process.settings import TABLE

    given: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(
                f"--set {text!r} is not NAME=VALUE; allowed names: {', '.join(TABLE)}."
            )
        given[name.strip().lower().replace("-", "_")] = value
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``precision-shim`` with these words, or ``sys.argv[1:]``; raise ``SystemExit``."""
    try:
        _main(arguments)
    except KeyboardInterrupt:
        Progress.stop()
        print("precision-shim: interrupted", file=sys.stderr)
        raise SystemExit(130) from None  # as of SIGINT in a shell
    finally:
        Progress.stop()


def _main(arguments: Sequence[str] | None) -> NoReturn:
    from precision_shim.errors import PrecisionShimError
    from precision_shim.process.names import meant

    _open_closed_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Import only the module of the given command: `run` starts jobs and must be fast.
    parser = build_parser([name for name in COMMANDS if name in given[:1]] or COMMANDS)
    asked, unknown = parser.parse_known_args(given)
    if unknown and not asked.any_options:
        near = meant(unknown[0], [*asked.parser._option_string_actions])
        asked.parser.error(f"unknown arguments: {' '.join(unknown)}{near and f'; {near}'}")
    if asked.command is None:
        parser.print_help()
        raise SystemExit(0)
    try:
        _check_variables(given[0])
        if given[0] not in ("run", "demo"):  # the job and the demo report their progress themselves
            Progress(asked.parser.prog).start()
        raise SystemExit(asked.command(asked))
    except (PrecisionShimError, OSError) as error:
        Progress.stop()
        print(fitted(f"{asked.parser.prog}: {error}", sys.stderr), file=sys.stderr)
        if asked.parser.as_json:
            write(json.dumps({"error": str(error)}))
        raise SystemExit(2) from None


def _open_closed_streams() -> None:
    """Discard the output if the command was started with closed streams, as by a daemon.

    With ``run``, the job inherits the closed streams.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _check_variables(command: str) -> None:
    from precision_shim.process.settings import check_variables, resolve

    if command == "run":  # ``run`` checks the variables' values after its options override them
        check_variables(os.environ)
    elif command != "doctor":  # ``doctor`` itself lists invalid variables
        from precision_shim.process.registry import names

        resolve(known_frameworks=names())
