"""``precision-shim checkpoint PATH``: what it holds, and what a resume here makes of it."""

from __future__ import annotations

import argparse
import json
import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from . import add_command
from ._output import show

if TYPE_CHECKING:
    from . import Commands

_HELP = "tell what a checkpoint holds, and whether a resume here goes on exactly"
_MORE = (
    "Reads the files' metadata and a sample of the optimizer's values; opens no pickle, builds no "
    "model and needs no GPU. What a resume makes of it goes by this environment: the versions that "
    "are installed, and PRECISION_SHIM and its settings. What your job's own config asks for is "
    "told with --config; without it the doctor takes what the file shows. Exit status 0: a resume "
    "goes on exactly; 1: it does not; 2: there is no checkpoint that can be read, for the reason "
    "given."
)

_CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig.__init__"
_MORE_FIELDS = ("grad_reduce_in_fp32", "precision")


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "checkpoint", run, help=_HELP, more=_MORE)
    parser.add_argument(
        "path", metavar="PATH", help="directory of a run, a step, a model, or the files"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    parser.add_argument(
        "--framework", metavar="NAME", help="whose checkpoint it is, where that does not show"
    )
    parser.add_argument(
        "--config",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="a field of Megatron's OptimizerConfig that your job's config has, or "
        "grad_reduce_in_fp32, or precision=fp16 for a job on FSDP or DTensor; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Look, foretell, print, and return the exit status."""
    from .._registry import entries
    from ..checkpoints.foretelling import Here
    from ..checkpoints.report import examine
    from ..errors import CheckpointUnreadableError, SettingsError

    known = sorted(entries(third_party=False))
    if arguments.framework not in (None, *known):
        arguments.parser.error(
            f"--framework {arguments.framework!r} is not known; allowed: {', '.join(known)}"
        )
    try:
        here = Here.now(_config(arguments.config))
    except SettingsError as error:
        arguments.parser.error(str(error))
    try:
        found = examine(arguments.path, here, arguments.framework)
    except CheckpointUnreadableError as error:
        if arguments.json:
            print(json.dumps({"ok": False, "path": arguments.path, "unreadable": str(error)}))
        else:
            print(error, file=sys.stderr)
        return 2
    ok = all(one.outcome.exact for one in found)
    environment = {
        "shim": here.on,
        "optimizer_states": here.settings["optimizer_states"],
        "versions": here.versions(found[0].part.framework),
    }
    if arguments.json:
        parts = [one.to_dict() for one in found]
        values = {"ok": ok, "path": arguments.path, "here": environment, "parts": parts}
        print(json.dumps(values, indent=1))
        return int(not ok)
    blocks = ["\n".join(one.lines()) for one in found]
    there = here.versions(found[0].part.framework)
    versions = ", ".join(f"{name} {one}" for name, one in there.items())
    shim = f"on, {environment['optimizer_states']}" if here.on else "off"
    blocks.append(f"here: {versions or 'none of the frameworks'}; the shim is {shim}")
    show("\n\n".join(blocks))
    return int(not ok)


def _config(texts: list[str]) -> dict[str, Any] | None:
    """What ``--config`` gives; ``None`` where it was not used.

    Raises:
        SettingsError: one is not FIELD=VALUE, there is no such field, or a number is none.
    """
    from ..errors import SettingsError

    found: dict[str, Any] = {}
    words = {"true": True, "false": False, "none": None, "1": True, "0": False}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise SettingsError(f"--config {text!r} is not FIELD=VALUE.")
        name, value = name.strip(), value.strip()
        _check(text, name)
        found[name] = words.get(value.lower(), value)
        if name == "adam_beta2":
            try:
                found[name] = float(value)
            except ValueError:
                raise SettingsError(f"--config {text!r}: {value!r} is no number.") from None
    return found or None


def _check(text: str, name: str) -> None:
    """A field that the installed Megatron does not know would be left out, and the verdict wrong.

    Raises:
        SettingsError: there is no such field.
    """
    from ..errors import SettingsError
    from ..seams import look

    fields = look(_CONFIG).parameters  # none where Megatron is not installed
    if not fields or name in (*fields, *_MORE_FIELDS):
        return
    near = get_close_matches(name, (*fields, *_MORE_FIELDS), n=1)
    meant = f"; did you mean {near[0]}?" if near else "."
    raise SettingsError(
        f"--config {text!r}: Megatron's OptimizerConfig has no field {name!r} here{meant} Allowed: "
        f"its fields, and {', '.join(_MORE_FIELDS)}."
    )
