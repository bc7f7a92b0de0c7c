"""Compose a verl job's config as Hydra does in verl's entry point, without importing verl."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from precision_shim.adapting import versioned
from precision_shim.errors import PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.values import said

from ..resolving import plain

SEARCH_PATH = "hydra.searchpath"
"""Hydra's key for additional directories with config groups."""


@dataclass(frozen=True)
class Asked:
    """The arguments that Hydra reads from a job's launch command.

    Attributes:
        path: the directory of the config, or ``pkg://`` and a package's name.
        name: the config's name.
        overrides: the overrides.
        directory: an additional directory of configs (``--config-dir``); empty without one.
    """

    path: str
    name: str
    overrides: tuple[str, ...]
    directory: str = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """The directories and packages of the job's configs, except Hydra's own configs."""
        named = (self.path.removeprefix("pkg://"), self.directory)
        return tuple(place for place in named if place)


def _where() -> str:
    return versioned("verl")


def compose(
    job: Job, unresolved: list[str] | None = None, missing: list[str] | None = None
) -> dict[str, Any]:
    """Compose a job's config, and apply the overrides of the job's command line.

    Args:
        job: the job.
        unresolved: see ``plain``.
        missing: a list; ``compose`` appends the keys whose value is ``MISSING``.

    Raises:
        PlanError: hydra cannot compose the config.
    """
    asked = named_config(job)
    from hydra import compose
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path, validate_config_path
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra

    packaged = asked.path.startswith("pkg://")
    if not packaged and job.source is None and not os.path.isdir(asked.path):
        raise PlanError(
            f"{_where()}, {job.target}: there is no such module or file here; expected an entry "
            "point of this version. Start from the directory that the job starts in."
        )
    for place in ("" if packaged else asked.path, asked.directory):
        if place and not os.path.isdir(place):
            raise PlanError(
                f"{_where()}: {place}: there is no such directory of configs; expected the one "
                f"that {job.target} names. Start from the directory that the job starts in."
            )
    GlobalHydra.instance().clear()
    try:
        validate_config_path(asked.path)
        search = create_config_search_path(asked.path)
        if asked.directory:
            # Insert the directory where hydra.main inserts it: before structured configs.
            anchor = SearchPathQuery(provider="schema")
            search.prepend("command-line", f"file://{asked.directory}", anchor)
        Hydra.create_main_hydra2("plan", search)
        made = compose(asked.name, list(asked.overrides))
        found = [] if missing is None else missing
        config: dict[str, Any] = plain(made, unresolved=unresolved, missing=found.append)
    except Exception as error:  # hydra and omegaconf have many exception classes
        raise PlanError(
            f"{_where()}, {asked.path}/{asked.name.removesuffix('.yaml')}.yaml: {said(error)}. "
            "Correct the override or the file."
        ) from error
    finally:
        GlobalHydra.instance().clear()
    return config


def named_config(job: Job) -> Asked:
    """Read a launch line with Hydra's own parser, and read the entry point's decorator.

    Raises:
        PlanError: hydra is not installed, or rejects the launch line.
    """
    try:
        from hydra._internal.utils import compute_search_path_dir, get_args_parser
    except ImportError as error:
        raise PlanError(
            f"{_where()}: its configs need hydra ({error}). Install verl's requirements."
        ) from error
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise PlanError(
            f"{_where()}, {job.target}: hydra refuses the line: {message}. Write the overrides in "
            "one row: hydra takes no override behind an option that stands behind others."
        )

    parser.error = refuse
    asked = parser.parse_args(list(job.arguments))
    path, name = _read_decorator(job.source)
    beside = job.source if job.source is not None else Path.cwd() / "here.py"
    found = compute_search_path_dir(str(beside), None, asked.config_path or path)
    return Asked(
        path=str(found),
        name=asked.config_name or name,
        overrides=tuple(asked.overrides),
        directory=os.path.abspath(asked.config_dir) if asked.config_dir else "",
    )


def _read_decorator(source: Path | None) -> tuple[str, str]:
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
