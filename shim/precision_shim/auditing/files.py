"""Write and read audits as JSON files, one file for each rank and optimizer."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from .record import Audit, AuditComponent, AuditPart

T = TypeVar("T")

SUFFIX = ".audit.json"


def stem(audit: Audit) -> str:
    """Return the beginning of an audit's file name, such as ``"verl.actor.dense+experts"``."""
    names = "+".join(part.name for part in audit.parts)
    words = (audit.framework, audit.subject or "optimizer", names)
    return ".".join(re.sub(r"[^\w+-]+", "-", word) for word in words)


def write(directory: str | os.PathLike[str], stem: str, audit: Audit) -> Path:
    """Write an audit into a file; the file is replaced atomically.

    Args:
        directory: the file's directory; created if it does not exist.
        stem: the beginning of the file's name; ``write`` appends the rank.
        audit: the audit.

    Raises:
        OSError: the file cannot be written; no temporary file is left.
    """
    path = Path(directory) / f"{stem}.rank{audit.rank}{SUFFIX}"
    write_whole(path, json.dumps(audit.to_dict(), indent=1) + "\n")
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically; its directory is created if it does not exist.

    Raises:
        OSError: the file cannot be written; no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".audit-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # mkstemp lets only the owner read the file
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def not_written(directory: str | os.PathLike[str], error: OSError) -> str:
    """Return the warning that audits are not written; its text names no optimizer and no step."""
    # str(error) would contain the temporary file's name, which differs each time.
    problem = (
        f"PRECISION_SHIM_AUDIT_DIR={directory}: the audit was not written: "
        f"{error.strerror or error}. Set PRECISION_SHIM_AUDIT_DIR to a directory that every rank "
        "may write to, or unset it. status() has the audit all the same."
    )
    return problem


def number(path: Path, audit: Audit) -> str:
    """Return the number that ``kept.name`` appended to a file's name, or an empty string."""
    name = path.name.removesuffix(f".rank{audit.rank}{SUFFIX}")
    return name.removeprefix(stem(audit)).removeprefix("-")


def refuse_newer(kind: type[Any], values: Mapping[str, Any]) -> None:
    """Raise ValueError if a file's record has fields that this version of the shim lacks."""
    unknown = sorted(values.keys() - {field.name for field in fields(kind)})
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: not known to this precision_shim. A newer one wrote the file; "
            "compare the audits with that version"
        )


def read_audits(directory: str | os.PathLike[str]) -> Iterator[tuple[Path, Audit | str]]:
    """Read the audits in a directory; see ``read_files``."""
    return read_files(directory, SUFFIX, _make)


def _make(values: Mapping[str, Any]) -> Audit:
    for part in values["parts"]:
        refuse_newer(AuditPart, part)
        for component in part["components"].values():
            refuse_newer(AuditComponent, component)
    return Audit.from_dict(values)


def read_files(
    directory: str | os.PathLike[str], suffix: str, make: Callable[[Any], T]
) -> Iterator[tuple[Path, T | str]]:
    """Read a directory's JSON files in order of their names; yield an error for an invalid file.

    Args:
        directory: the directory of the files.
        suffix: the end of the files' names.
        make: function that converts a file's parsed JSON into a record.

    Raises:
        OSError: the directory cannot be read.
    """
    for path in sorted(Path(directory).iterdir()):
        if not path.name.endswith(suffix):
            continue
        try:
            record = make(json.loads(path.read_text(encoding="utf-8")))
            _check_types(record)
        except (
            *(OSError, ValueError, KeyError, TypeError, AttributeError),
            *(OverflowError, RecursionError),  # JSON with inf or deep nesting raises these errors
        ) as error:
            yield path, f"{type(error).__name__}: {error}"
        else:
            yield path, record


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
}
"""Maps the annotation of a record's field to the types that a file's value may have."""


def _check_types(record: Any) -> None:
    """Raise TypeError if a value in a file's record, or in a nested record, has a wrong type."""
    for field in fields(record):
        value = getattr(record, field.name)
        allowed = _TYPES.get(str(field.type))
        if allowed is not None and not isinstance(value, allowed):
            raise TypeError(f"{field.name} is {value!r}, expected {field.type}")
        several = value.values() if isinstance(value, Mapping) else value
        for inner in several if isinstance(several, Iterable) else ():
            if is_dataclass(inner):
                _check_types(inner)
            elif field.type == "tuple[str, ...]" and not isinstance(inner, str):
                raise TypeError(f"{field.name} has {inner!r}, expected names")
