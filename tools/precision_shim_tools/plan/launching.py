"""Which variables a launch line gives to a job's driver and to its workers, by its plain words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precision_shim.process import settings as _settings
from precision_shim.process.carriers import variables
from precision_shim.process.settings import PREFIX

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_WITH_VALUE = re.compile(r"(-u|--unset|-C|--chdir)=?(.*)")
"""Matches an option of ``env`` that takes a value."""
_IN_CONFIG = re.compile(r"\+*\S*runtime_env\.env_vars\.([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_RUNTIME_ENV = ("--runtime-env-json", "--runtime-env", "--working-dir")
_REMEDIES = {
    "env": f"write {PREFIX}=1 behind env's options",
    "srun": f"write --export=ALL,{PREFIX}=1",
    "ray": "which passes on no variable of this shell, add --runtime-env-json "
    f'\'{{"env_vars": {{"{PREFIX}": "1"}}}}\'',
}


@dataclass
class Launch:
    """What the words in front of a job's target do to its variables.

    Attributes:
        driver: the shim's variables in the process that the line starts.
        named: all variables that the line sets in that process.
        carried: the variables in ``runtime_env``, which Ray gives to each process of the job.
        folder: the directory in which the job starts.
        by: the last launcher that changed what the process inherits: ``env``, ``srun`` or ``ray``.
        unread: why a part of the line was not read.
    """

    driver: dict[str, str]
    named: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()
    by: str = ""
    unread: list[str] = field(default_factory=list)

    @property
    def workers(self) -> dict[str, str]:
        """The shim's variables in the processes that the driver starts."""
        lost = self.by == "ray" and _settings.switch(self.driver) in ("unset", "off")
        return {**({} if lost else self.driver), **variables(self.carried)}

    @property
    def remedy(self) -> str:
        """How this line switches the shim on."""
        return _REMEDIES.get(self.by, f"export {PREFIX}=1 where the job starts")

    def describe(self) -> str:
        """Return what driver and workers get; empty if both get the words in front, or nothing."""
        says = self.by or self.workers != self.driver
        if not says or PREFIX not in {**self.driver, **self.workers}:
            return ""
        driver, workers = (
            ", ".join(f"{name}={value}" for name, value in sorted(found.items()))
            if PREFIX in found
            else f"{PREFIX} is unset"
            for found in (self.driver, self.workers)
        )
        who = "the driver and the workers" if driver == workers else "the driver"
        rest = f"; in the workers: {workers}" * (driver != workers)
        return f"the shim's variables by this launch line, in {who}: {driver}{rest}"

    def assign(self, name: str, value: str) -> None:
        """Set a variable in the process that the line starts."""
        self.named[name] = value
        self.driver.update(variables({name: value}))


def read_launch(
    front: Sequence[str], arguments: Sequence[str] = (), shell: Mapping[str, str] | None = None
) -> Launch:
    """Follow the words in front of a job's target, from left to right.

    Args:
        front: these words: variables, ``env``, ``srun``, ``ray job submit`` and other launchers.
        arguments: the target's own, which may have a ``runtime_env`` of the framework's config.
        shell: the environment in which the line is written; by default this process's.
    """
    launch = Launch(variables(os.environ if shell is None else shell))
    launcher, words = "", iter(enumerate(front))
    for at, word in words:
        option, equals, value = word.partition("=")
        value = value if equals else "".join(front[at + 1 : at + 2])
        assigned = _ASSIGNMENT.fullmatch(word)
        if assigned:
            launch.assign(assigned[1], assigned[2])
        elif Path(word).name in ("env", "srun", "sbatch"):
            launcher = Path(word).name
        elif word == "submit" and front[at - 1] == "job":
            launcher = launch.by = "ray"
            launch.driver.clear()
        elif launcher == "env" and not word.startswith("-"):
            launcher = ""
        elif launcher == "env":
            _env(launch, word, words)
        elif option == "--export" and launcher in ("srun", "sbatch"):
            launch.by = "srun"
            _export(launch, value.split(","))
        elif option in _RUNTIME_ENV and launcher == "ray":
            _runtime_env(launch, option, value)
    for word in arguments:
        assigned = _IN_CONFIG.fullmatch(word)
        if assigned:
            launch.carried[assigned[1]] = assigned[2]
    return launch


def _env(launch: Launch, option: str, words: Iterator[tuple[int, str]]) -> None:
    """Read an option of ``env``; its value may be the next of ``words``."""
    found = _WITH_VALUE.fullmatch(option)
    value = found and (found[2] or next(words, (0, ""))[1])
    if found and found[1] in ("-C", "--chdir"):
        launch.folder /= str(value)
    elif found or option in ("-", "-i", "--ignore-environment"):
        launch.by = "env"
        for name in [value] if found else [*launch.driver]:
            launch.driver.pop(str(name), None)


def _export(launch: Launch, names: Sequence[str]) -> None:
    """Read ``--export`` of Slurm: ``ALL``, ``NONE`` or names, each perhaps with a value."""
    before = launch.driver.copy()
    if "ALL" not in names:
        launch.driver.clear()
    for name, equals, value in (one.partition("=") for one in names):
        if equals:
            launch.assign(name, value)
        elif name in before:
            launch.driver[name] = before[name]


def _runtime_env(launch: Launch, option: str, value: str) -> None:
    """Read an option of ``ray job submit``; ``env_vars`` are also those of the job's driver."""
    found: Any = {"working_dir": value}
    try:
        if option == "--runtime-env-json":
            found = json.loads(value)
        elif option == "--runtime-env":
            import yaml

            found = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
        given = {str(name): str(one) for name, one in (found.get("env_vars") or {}).items()}
    except Exception as error:  # a file of another machine, or no yaml
        launch.unread.append(f"{option} {value} cannot be read here, so it is left out: {error}")
        return
    launch.carried.update(given)
    for name, one in given.items():
        launch.assign(name, one)
    folder = Path(str(found.get("working_dir") or ""))
    if found.get("working_dir") and folder.is_dir():
        launch.folder = folder
