"""Compose a verl job's config with Hydra's public API, as verl's entry point does, without verl."""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from precision_shim.adapting import meant, versioned
from precision_shim.errors import PlanError
from precision_shim.precision.effect import names_precision
from precision_shim_adapters.common.omegaconf_values import plain

from ..command import Job, file_of, find_imported
from ..values import said


def compose(
    job: Job, unresolved: list[str] | None = None, added: list[str] | None = None
) -> dict[str, Any]:
    """Compose a job's config and apply its command line's overrides; ``unresolved``: see ``plain``.

    The overrides that set a precision, at keys that the config lacks, are appended to ``added``.

    Raises:
        PlanError: the line has other options, or hydra cannot compose the config.
    """
    asked = _read_options(job)
    if job.source is None:
        raise PlanError(
            f"{versioned('verl')}, {job.target}: there is no such module or script here. Correct "
            "its name, or plan in the environment and the directory of the job."
        )
    source, path, name = _read_decorator(job.source)
    path, name = asked.config_path or path, asked.config_name or name
    if not path.startswith("pkg://"):
        path = os.path.normpath(source.parent.resolve() / path)
    directory = os.path.abspath(asked.config_dir) if asked.config_dir else ""
    beside = f"--config-path is relative to {source}. Correct it, or write the whole path."
    begun = "Start from the directory that the job starts in."
    for place, remedy in ((path, beside), (directory, begun)):
        if place and not place.startswith("pkg://") and not os.path.isdir(place):
            raise PlanError(
                f"{versioned('verl')}, {job.target}: {place}: there is no such directory of "
                f"configs. {remedy}"
            )
    try:
        from hydra import compose, initialize_config_dir, initialize_config_module
        from hydra.core.plugins import Plugins

        plugin = _command_line()
        plugin.directory = directory
        Plugins.instance().register(plugin)
        initialize: Any = initialize_config_dir
        if path.startswith("pkg://"):
            initialize = initialize_config_module
        try:
            with initialize(path.removeprefix("pkg://"), version_base=None):
                made = compose(name, asked.overrides)
                config: dict[str, Any] = plain(made, unresolved=unresolved)
                if added is not None:
                    added += _added(asked.overrides, lambda own: compose(name, own))
        finally:
            plugin.directory = ""
    except Exception as error:  # hydra and omegaconf have many exception classes
        file = f"{path}/{name.removesuffix('.yaml')}.yaml"
        names = [] if os.path.isfile(file) else [one.stem for one in Path(path).glob("*.yaml")]
        near = meant(Path(file).stem, names)
        raise PlanError(
            f"{versioned('verl')}, {file}: {near and f'{near} '}{said(error)}. Correct the "
            "override or the file, or plan in the environment of the job."
        ) from error
    return config


def _added(overrides: Sequence[str], compose: Callable[[list[str]], Any]) -> Iterator[str]:
    """Yield the overrides that set a precision at a key that the config lacks without them.

    Hydra takes ``+`` only for such a key; only for ``++`` the config is composed a second time.
    """
    from omegaconf import OmegaConf

    config, absent = None, object()
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if not word.startswith("+") or not names_precision(key, value):
            continue
        if word.startswith("++"):
            if config is None:
                config = compose([one for one in overrides if not one.startswith("+")])
            if OmegaConf.select(config, key, default=absent) is not absent:
                continue
        yield f"{key}={value}"


@cache
def _command_line() -> Any:
    """A plugin that adds a directory of configs where ``hydra.main`` adds that of ``--config-dir``.

    Hydra's registry of plugins keeps it. Without a directory it does nothing.
    """
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class CommandLine(SearchPathPlugin):  # type: ignore[misc]
        directory = ""

        def manipulate_search_path(self, search_path: Any) -> None:
            if self.directory:
                search_path.append("command-line", f"file://{self.directory}")

    return CommandLine


class _HydraParser(argparse.ArgumentParser):
    """Parses the options of ``hydra.main`` that name a config."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(
            f"{versioned('verl')}, {self.prog}: the options of hydra that name no config are not "
            f"planned, and overrides stand in one row: {message}. Correct the line."
        )


def _read_options(job: Job) -> argparse.Namespace:
    parser = _HydraParser(job.target, add_help=False)
    for option, short in (("path", "-cp"), ("name", "-cn"), ("dir", "-cd")):
        parser.add_argument(f"--config-{option}", short, default="")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args(list(job.arguments))


def _read_decorator(script: Path) -> tuple[Path, str, str]:
    """Read the decorator of a job's main function, which a script may import from another file.

    Returns:
        The file with the decorator, from which hydra begins, its ``config_path``, and its
        ``config_name``; by default the script, and those of verl.
    """
    words = {"config_path": "config", "config_name": "ppo_trainer"}
    modules = map(file_of, find_imported(script))
    for source in filter(None, (script, *modules)):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
                for keyword in node.keywords:
                    if keyword.arg in words and isinstance(keyword.value, ast.Constant):
                        words[keyword.arg] = str(keyword.value.value)
                return source, words["config_path"], words["config_name"]
    return script, words["config_path"], words["config_name"]
