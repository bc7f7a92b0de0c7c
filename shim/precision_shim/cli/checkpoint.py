"""``precision-shim checkpoint PATH``: what it holds, and what a resume here makes of it."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..process.names import meant
from . import add_command
from ._output import show

if TYPE_CHECKING:
    from . import Commands

_HELP = "Tell what a checkpoint holds, and whether a resume here goes on exactly."
_MORE = (
    "Reads the files' metadata, a sample of the optimizer's values and, of the small files, all "
    "that has a checksum; opens no pickle, builds no model and needs no GPU. What a resume makes "
    "of it goes by this environment: the versions that are installed, and PRECISION_SHIM and its "
    "settings. What your job's own config asks for is told with --config; without it the doctor "
    "takes what the file shows. Exit status 0: a resume goes on exactly; 1: it does not; 2: there "
    "is no checkpoint that can be read, for the reason given."
)

_CONFIG = "megatron.core.optimizer.optimizer_config:OptimizerConfig.__init__"
_MORE_FIELDS = ("grad_reduce_in_fp32", "precision", "use_legacy_worker_impl")
_DECIDING = (
    "adam_beta2",
    "bf16",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "fp16",
    "loss_scale",
    "main_grads_dtype",
    "main_params_dtype",
    "optimizer",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "params_dtype",
    "store_param_remainders",
    "use_distributed_optimizer",
    "use_precision_aware_optimizer",
)
"""Fields of OptimizerConfig that the answer may go by: all that is known where Megatron is not."""

_WORKERS = ("auto", "enable", "disable")


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "checkpoint", run, help=_HELP, more=_MORE)
    parser.add_argument(
        "path", metavar="PATH", help="directory of a run, a step, a model, or the files"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    parser.add_argument(
        "--full",
        action="store_true",
        help="read every byte that has a checksum; by default 256 MiB, the small files first",
    )
    parser.add_argument(
        "--framework", metavar="NAME", help="whose checkpoint it is, where that does not show"
    )
    parser.add_argument(
        "--config",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="a field of Megatron's OptimizerConfig that your job's config has, or "
        "grad_reduce_in_fp32, or precision=fp16 for a job on FSDP or DTensor, or verl 0.7's "
        "use_legacy_worker_impl; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Look, foretell, print, and return the exit status."""
    from ..checkpoints.checking import MOST
    from ..checkpoints.foretelling import Here
    from ..checkpoints.report import examine
    from ..errors import CheckpointUnreadableError, DtypeError, SettingsError
    from ..process.registry import entries

    known = sorted(entries(third_party=False))
    if arguments.framework not in (None, *known):
        arguments.parser.error(
            f"--framework {arguments.framework!r} is not known; allowed: {', '.join(known)}"
        )
    try:
        here = Here.now(_config(arguments.config))
    except (DtypeError, SettingsError) as error:
        arguments.parser.error(str(error))
    try:
        most = None if arguments.full else MOST
        found = examine(arguments.path, here, arguments.framework, most=most)
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
    _check_values(found)
    return found or None


def _check_values(found: dict[str, Any]) -> None:
    """Whatever the checkpoint is, and whether its foretelling asks for the field or not.

    Raises:
        DtypeError: a name of a dtype is unknown.
        SettingsError: a word is.
    """
    from ..errors import SettingsError

    workers = found.get("use_legacy_worker_impl", "auto")
    if workers not in _WORKERS:
        raise SettingsError(
            f"--config use_legacy_worker_impl={workers!r}: allowed: {', '.join(_WORKERS)}."
        )
    if find_spec("torch") is None:  # the names are torch's; and nothing is resumed here
        return
    from ..precision.dtypes import coerce_dtype, coerce_dtypes

    coerce_dtypes(found, where="--config")
    coerce_dtype(found.get("precision"), key="precision", where="--config")


def _check(text: str, name: str) -> None:
    """A field that the installed Megatron does not know would be left out, and the verdict wrong.

    Raises:
        SettingsError: there is no such field.
    """
    from ..errors import SettingsError
    from ..seams import look

    fields = look(_CONFIG).parameters or _DECIDING  # none where Megatron is not installed
    if name in (*fields, *_MORE_FIELDS):
        return
    near = meant(name, (*fields, *_MORE_FIELDS))
    raise SettingsError(
        f"--config {text!r}: Megatron's OptimizerConfig has no field {name!r} here"
        f"{'; ' if near else '.'}{near} Allowed: its fields, and "
        f"{', '.join(_MORE_FIELDS)}."
    )
