"""Compose a verl job's config with Hydra's public API, as verl's entry point does, without verl."""

from __future__ import annotations

import argparse
import ast
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from precision_shim.adapting import versioned
from precision_shim.errors import PlanError
from precision_shim_adapters.common.omegaconf_values import plain

from ..command import Job
from ..values import said


@dataclass(frozen=True)
class HydraArguments:
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


def compose(job: Job, unresolved: list[str] | None = None) -> dict[str, Any]:
    """Compose a job's config, and apply the overrides of the job's command line.

    Args:
        job: the job.
        unresolved: see ``plain``.

    Raises:
        PlanError: hydra cannot compose the config.
    """
    asked = named_config(job)
    for place in (asked.path, asked.directory):
        if place and not place.startswith("pkg://") and not os.path.isdir(place):
            raise PlanError(
                f"{versioned('verl')}, {job.target}: {place}: there is no such directory of "
                "configs. Start from the directory that the job starts in."
            )
    try:
        from hydra import compose, initialize_config_dir, initialize_config_module

        initialize: Any = initialize_config_dir
        if asked.path.startswith("pkg://"):
            initialize = initialize_config_module
        with initialize(asked.path.removeprefix("pkg://"), version_base=None):
            overrides = list(asked.overrides)
            if asked.directory:
                overrides.insert(0, f"hydra.searchpath=[file://{asked.directory}]")
            config: dict[str, Any] = plain(compose(asked.name, overrides), unresolved=unresolved)
    except Exception as error:  # hydra and omegaconf have many exception classes
        raise PlanError(
            f"{versioned('verl')}, {asked.path}/{asked.name.removesuffix('.yaml')}.yaml: "
            f"{said(error)}. Correct the override or the file, or plan in the environment of the "
            "job."
        ) from error
    return config


class _HydraParser(argparse.ArgumentParser):
    """Parses the options of ``hydra.main`` that name a config."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(
            f"{versioned('verl')}, {self.prog}: the options of hydra that name no config are not "
            f"planned, and overrides stand in one row: {message}. Correct the line."
        )


def named_config(job: Job) -> HydraArguments:
    """Read the options and overrides of a launch line, and the entry point's decorator.

    Raises:
        PlanError: the line has other options, or hydra would reject it.
    """
    parser = _HydraParser(job.target, add_help=False)
    for option, short in (("path", "-cp"), ("name", "-cn"), ("dir", "-cd")):
        parser.add_argument(f"--config-{option}", short, default="")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args(list(job.arguments))
    path, name = _read_decorator(job.source)
    path = asked.config_path or path
    if not path.startswith("pkg://"):
        beside = job.source.parent.resolve() if job.source is not None else Path.cwd()
        path = os.path.normpath(beside / path)
    return HydraArguments(
        path=path,
        name=asked.config_name or name,
        overrides=tuple(asked.overrides),
        directory=os.path.abspath(asked.config_dir) if asked.config_dir else "",
    )


def _read_decorator(source: Path | None) -> tuple[str, str]:
    """The ``config_path`` and the ``config_name`` of an entry point; by default those of verl."""
    words = {"config_path": "config", "config_name": "ppo_trainer"}
    tree = ast.parse("" if source is None else source.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            for keyword in node.keywords:
                if keyword.arg in words and isinstance(keyword.value, ast.Constant):
                    words[keyword.arg] = str(keyword.value.value)
    return words["config_path"], words["config_name"]
