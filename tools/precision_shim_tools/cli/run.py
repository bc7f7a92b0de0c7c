"""``precision-shim run -- COMMAND``: run a job with the shim on, also in all child processes.

``run`` sets environment variables and replaces itself with the command (``exec``). The job's
command therefore has the process id, signals and exit status of ``run``. The shim is on in
processes that read the start-up file, and in the workers of Ray jobs.
"""

from __future__ import annotations

import argparse
import os
import sys

from precision_shim.process import registry as _registry
from precision_shim.process import settings as _settings
from precision_shim.process.settings import FEATURES, PREFIX, TABLE

from . import OPTIONS, settings_of

HELP = "Run COMMAND with the shim on in it and in all its children."
MORE = "Example: precision-shim run --strict -- python -m verl.trainer.main_ppo ..."


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "precision-shim run [options] [--] COMMAND ..."
    parser.add_argument(
        "--features",
        metavar="LIST",
        help=f"comma list of {', '.join(FEATURES)}; -NAME takes one away from all",
    )
    known = ", ".join(_registry.entries(third_party=False))
    parser.add_argument(
        "--frameworks", metavar="LIST", help=f"comma list of {known}, and those of third parties"
    )
    parser.add_argument(
        "--strict", action="store_true", help="what cannot be patched is an error in the job"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting, such as optimizer_states=follow-model; may be repeated; names: "
        f"{', '.join(TABLE)}",
    )
    # REMAINDER collects all words from the first word that is no option of `precision-shim run`.
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")


def run(asked: argparse.Namespace) -> int:
    """Set the environment variables and execute the command in this process."""
    command = job_of(asked)
    if not command or not command[0]:
        asked.parser.error("COMMAND is missing: what is to be run?")
    ours = variables(asked)
    if _settings.switch() == "off":
        # PRECISION_SHIM=0, the operator's kill switch, takes precedence over all options.
        print(
            f"precision-shim run: {PREFIX}={os.environ[PREFIX]} is set: the command runs without "
            "the shim",
            file=sys.stderr,
        )
    else:
        os.environ.update(ours)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:  # exit statuses as a shell returns them
        print(f"precision-shim run: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def job_of(asked: argparse.Namespace) -> list[str]:
    """Return the words of COMMAND."""
    words: list[str] = asked.job
    return words[1:] if words[:1] == ["--"] else words


def variables(asked: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that have the same effect as the options.

    Raises:
        SettingsError: a name or value is invalid.
    """
    resolved = _settings.resolve(
        features=asked.features,
        frameworks=asked.frameworks,
        strict=asked.strict or None,
        settings=settings_of(asked.settings),
        known_frameworks=_registry.entries(),
        where=OPTIONS,
    )
    return {**resolved.given, PREFIX: "strict" if resolved.strict else "1"}
