"""Compose a verl job's config as Hydra does in verl's entry point, without importing verl."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from precision_shim.adapting import versioned
from precision_shim.errors import PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.values import said

from ..resolving import plain

_FLAG = re.compile(r"--?(config-name|config-path|config-dir|cn|cp|cd)(?:=(.*))?$")
SEARCH_PATH = "hydra.searchpath"
"""Hydra's key for additional directories with config groups."""


def _where() -> str:
    return versioned("verl")


def compose(job: Job, unresolved: list[str] | None = None) -> dict[str, Any]:
    """Compose the config of a job, with the overrides.

    Args:
        job: the job.
        unresolved: see ``plain``.

    Raises:
        PlanError: hydra cannot compose the config.
    """
    try:
        from hydra import compose, initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
    except ImportError as error:
        raise PlanError(
            f"{_where()}: its configs need hydra ({error}). Install verl's requirements."
        ) from error
    directory, name, overrides = named_config(job)
    if job.source is None and not directory.is_dir():
        raise PlanError(
            f"{_where()}, {job.target}: there is no such module or file here; expected an entry "
            "point of this version. Start from the directory that the job starts in."
        )
    if not directory.is_dir():
        raise PlanError(
            f"{_where()}: {directory}: there is no such directory of configs; expected the one "
            f"that {job.target} names. Start from the directory that the job starts in."
        )
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(directory.resolve()), version_base=None):
            config: dict[str, Any] = plain(compose(name, overrides), unresolved=unresolved)
    except Exception as error:  # hydra and omegaconf have many exception classes
        raise PlanError(
            f"{_where()}, {directory / name}.yaml: {said(error)}. Correct the override or the file."
        ) from error
    return config


def named_config(job: Job) -> tuple[Path, str, list[str]]:
    """Return the config's directory, the config's name, and the overrides."""
    flags: dict[str, str] = {}
    overrides = []
    words = iter(job.arguments)
    for word in words:
        match = _FLAG.match(word)
        if match:
            value = match.group(2) if match.group(2) is not None else next(words, "")
            short = {"cn": "config-name", "cp": "config-path", "cd": "config-dir"}
            flags[short.get(match.group(1), match.group(1))] = value
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
    path, name = _read_decorator(job.source)
    beside = job.source.parent if job.source is not None else Path.cwd()
    directory = beside / flags.get("config-path", path)
    if "config-dir" in flags:
        given = Path(flags["config-dir"])
        wanted = flags.get("config-name", name).removesuffix(".yaml")
        if (given / f"{wanted}.yaml").is_file():
            directory = given
        else:  # Hydra searches ``given`` for config groups too
            overrides.append(f"{SEARCH_PATH}=[{given.resolve().as_uri()}]")
    return directory, flags.get("config-name", name).removesuffix(".yaml"), overrides


def _read_decorator(source: Path | None) -> tuple[str, str]:
    """Read the arguments of ``@hydra.main`` from an entry point's source."""
    words = {"config_path": "config", "config_name": "ppo_trainer"}
    if source is None:
        return words["config_path"], words["config_name"]
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise PlanError(
            f"{source}: cannot be read: {error}; expected Python. Repair it."
        ) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            for keyword in node.keywords:
                if keyword.arg in words and isinstance(keyword.value, ast.Constant):
                    words[keyword.arg] = str(keyword.value.value)
    return words["config_path"], words["config_name"]
