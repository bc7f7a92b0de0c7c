"""Check values that torch's ``fully_shard``, optimizers and schedulers refuse."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from precision_shim.adapting import look
from precision_shim.planning.record import Problem
from precision_shim.planning.values import said


def of_reshard(value: object, key: str, subject: str, shards: int) -> Iterator[Problem]:
    """Yield a problem if ``fully_shard`` refuses a value of ``reshard_after_forward``.

    Args:
        value: the value; ``None`` and booleans are legal.
        key: the value's key in the job's config.
        subject: the model's name.
        shards: the number of ranks over which a parameter is sharded.
    """
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int):
        fault = f"{value!r}: torch takes a bool, or the number of ranks to reshard to"
        yield Problem("size", subject, key, fault, "Write true or false.")
    elif value < 1 or shards % value:
        fault = f"{value} is no divisor of the {shards} ranks of a shard group"
        yield Problem("size", subject, key, fault, "Write true or false, or a divisor.")


def of_wrap_policy(value: object, key: str, subject: str) -> Iterator[Problem]:
    """Yield a problem if a ``wrap_policy`` has no keys."""
    if not hasattr(value, "get"):
        fault = f"{value!r}: expected a section with keys"
        yield Problem("key", subject, key, fault, "Leave it out, or write its keys.")


def of_class(
    module: str, name: str, keys: tuple[str, str], subject: str, where: str
) -> Iterator[Problem]:
    """Yield a problem if an optimizer's module is not on this machine, or lacks the class.

    A module that nobody imported yet is looked for without an import. Its classes are not checked.

    Args:
        module: the module's name.
        name: the name of the class.
        keys: config keys of the module and of the class; they may be the same.
        subject: the model's name.
        where: framework and version.
    """
    imported = sys.modules.get(module)
    if imported is None and not look(f"{module}:{name}").module_found:
        fault = f"{where}: {keys[0]}: no module {module!r} on this machine; its worker imports it"
        remedy = "Write a module such as torch.optim, or install the package."
        yield Problem("key", subject, keys[0], fault, remedy)
    elif imported is not None and not hasattr(imported, name):
        fault = f"{where}: {keys[1]}={name!r}: {keys[0]} names {module}, which has no such class"
        yield Problem("key", subject, keys[1], fault, "Write the name of a class in it.")


def of_arguments(
    name: str, written: Mapping[str, Any], key: str, subject: str
) -> Iterator[Problem]:
    """Yield a problem for each argument that a class of ``torch.optim`` refuses.

    Args:
        name: the name of a class that ``torch.optim`` has.
        written: the arguments in the job's config; unknown names are left out.
        key: config key of an argument, with ``{}`` for its name.
        subject: the model's name.
    """
    kind = getattr(torch.optim, name)
    known = inspect.signature(kind).parameters
    for argument, value in written.items():
        error = refusal(kind, argument, value) if argument in known else None
        if error is not None:
            fault = f"torch.optim.{name}: {error}"
            yield Problem("number", subject, key.format(argument), fault, "Correct it.")


def refusal(kind: Callable[..., Any], argument: str, value: object) -> str | None:
    """Why a class of ``torch.optim`` refuses an argument; ``None`` if it accepts it."""
    if isinstance(value, str) and value.startswith("torch."):
        return None  # a name that the framework may replace by the dtype
    try:
        kind([torch.nn.Parameter(torch.zeros(1))], **{argument: value})
    except Exception as error:  # torch raises various errors
        return said(error)
    return None
