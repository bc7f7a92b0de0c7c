"""``precision-shim checkpoint PATH``: show a checkpoint's content and predict its resume."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from precision_shim.process import registry as _registry
from precision_shim.process.names import meant

from ._output import fitted, show, write

HELP = "Tell what a checkpoint holds, and whether a resume here goes on exactly."
MORE = (
    "Reads the files' metadata and a sample of the optimizer's values; runs nothing that a file "
    "names, builds no model and needs no GPU. It predicts a "
    "resume in this environment: with the versions that are installed, and with PRECISION_SHIM and "
    "its settings. Give what your job's own config asks for with --config; without it the doctor "
    "assumes what the files show. Exit status 0: a resume goes on exactly; 1: it does not; 2: no "
    "checkpoint can be read, for the reason given; 3: it has states or files that no rule covers."
)

_PRECISION = "precision"
"""The field for ``--config`` that gives the compute dtype of a job without a Megatron config."""
_OTHERS = {"param_dtype": _PRECISION, "dtype": _PRECISION, "model_dtype": "params_dtype"}
"""Maps the frameworks' names of keys, without their sections, to fields for ``--config``."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    what = "directory of a run, a step, a model, or the files"
    parser.add_argument("path", metavar="PATH", help=what)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    parser.add_argument(
        "--framework", metavar="NAME", help="whose checkpoint it is, where that does not show"
    )
    parser.add_argument(
        "--config",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="a field of the optimizer's config that your job's config sets, or "
        f"{_PRECISION}=fp16 or params_dtype=... for a job on FSDP or DTensor; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine the checkpoint, print the result, and return the exit status."""
    from precision_shim.errors import CheckpointUnreadableError, DtypeError, SettingsError

    from ..checkpoint.prediction import Here
    from ..checkpoint.report import escaped, examine

    if not arguments.path:
        arguments.parser.error(
            "PATH is empty: is a variable not set? Give the directory of a run, of a step, of a "
            "model, or of its files."
        )
    whose = arguments.framework
    if whose is not None and whose not in (known := sorted(_registry.checkpoints())):
        arguments.parser.error(f"--framework {whose!r} is not known; allowed: {', '.join(known)}")
    try:
        here = Here.now(_config(arguments.config))
    except (DtypeError, SettingsError) as error:
        arguments.parser.error(str(error))
    try:
        examined = examine(arguments.path, here, whose)
    except CheckpointUnreadableError as error:
        if arguments.json:
            write(json.dumps({"ok": False, "path": arguments.path, "unreadable": str(error)}))
        else:
            print(fitted(escaped(str(error)), sys.stderr), file=sys.stderr)
        return 2
    verdicts = {model.outcome.verdict for model in examined}
    ok = verdicts == {"exact"}
    states = here.settings["optimizer_states"]
    if arguments.json:
        environment = {"shim": here.on, "optimizer_states": states}
        parts = [model.to_dict() for model in examined]
        values = {"ok": ok, "path": arguments.path, "here": environment, "parts": parts}
        write(json.dumps(values, indent=1))
    else:
        blocks = ["\n".join(model.lines()) for model in examined]
        blocks.append(f"here the shim is {f'on, {states}' if here.on else 'off'}")
        show("\n\n".join(blocks))
    return 0 if ok else 3 if verdicts <= {"exact", "not known"} else 1


_VALUES = {"true": True, "false": False, "none": None, "1": True, "0": False}


def _config(texts: list[str]) -> dict[str, Any] | None:
    if not texts:
        return None
    from precision_shim.errors import SettingsError

    config: dict[str, Any] = {}
    numbers = {name for backend in _registry.backends() for name in backend.config.numbers}
    rows = _registry.checkpoints().values()
    frameworks = {name: allowed for row in rows for name, allowed in row.fields.items()}
    for text in texts:
        name, equals, value = (word.strip() for word in text.partition("="))
        if not equals or not name:
            raise SettingsError(
                f"--config {text!r} is not FIELD=VALUE, such as exp_avg_dtype=bf16."
            )
        _check_name(text, name, frameworks)
        try:
            config[name] = float(value) if name in numbers else _VALUES.get(value.lower(), value)
        except ValueError:
            raise SettingsError(
                f"--config {text!r}: {value!r} is no number. Write one, such as {name}=1."
            ) from None
        allowed = frameworks.get(name, (config[name],))
        if config[name] not in allowed:
            raise SettingsError(f"--config {name}={config[name]!r}: allowed: {', '.join(allowed)}.")
    # Without torch no dtype can be parsed and no job resumed; its import takes seconds.
    if find_spec("torch") is not None:
        from precision_shim.precision.dtypes import coerce_dtype, coerce_dtypes

        coerce_dtypes(config, where="--config")
        coerce_dtype(config.get(_PRECISION), key=_PRECISION, where="--config")
    return config


def _check_name(text: str, name: str, frameworks: Iterable[str]) -> None:
    """Raise an error for an unknown field, because ignoring it could make the verdict wrong."""
    from precision_shim.errors import SettingsError
    from precision_shim.seams import look

    configs = [backend.config for backend in _registry.backends()]
    beside = [*(name for config in configs for name in config.beside), _PRECISION, *frameworks]
    known = list(beside)
    for config in configs:  # look() finds no function of a backend that is not installed
        known += look(config.place).parameters or config.fields
    if name not in known:
        last = name.rpartition(".")[2]
        near = meant(_OTHERS.get(last, last), known)
        raise SettingsError(
            f"--config {text!r}: {' and '.join(config.name for config in configs)} has no field "
            f"{name!r} here{'; ' if near else '.'}{near} Allowed: its fields, and "
            f"{', '.join(beside)}."
        )
