"""Read a job's launch command: its framework, its target, and the variables that it sets."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precision_shim.errors import PlanError
from precision_shim.files.models import directory_of

from ..predicted import PredictedFeatures
from . import shapes
from .launching import END, Launch, read_launch, unfold
from .shapes import Model

if TYPE_CHECKING:
    from precision_shim.process.framework import Adapter
    from precision_shim.process.settings import Settings


@dataclass(frozen=True)
class Options:
    """The options that the user gives in addition to the job's command.

    Attributes:
        model: a model's directory, used instead of the model in the job's config.
        parameters: the model's size, such as ``"7.6B"``, used instead of a directory.
    """

    model: str | None = None
    parameters: str | None = None


@dataclass(frozen=True)
class Job:
    """A job's launch command, read without importing the job's framework.

    Attributes:
        target: the module after ``-m``, or the script.
        source: the file of ``target``; ``None`` if the file is not on this machine.
        launcher: the command's words before ``target``.
        arguments: the command's words after ``target``.
        settings: the shim's settings.
        off: the setting that keeps the shim out, such as ``"PRECISION_SHIM=0"``; else empty.
        unset: whether ``PRECISION_SHIM`` is unset, so that only ``install()`` switches the shim on.
        launch: which of the shim's variables the command gives to driver and workers.
        refusals: why the job cannot be planned; the rest of it is checked in spite of them.
    """

    framework: str
    target: str
    source: Path | None
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    settings: Settings
    options: Options = field(default_factory=Options)
    off: str = ""
    unset: bool = False
    launch: Launch = field(default_factory=lambda: Launch({}))
    refusals: list[PlanError] = field(default_factory=list)

    def model(
        self,
        name: object,
        overrides: Mapping[str, Any] | None = None,
        adapt: shapes.Adapt | None = None,
    ) -> Model:
        """Return the names and shapes of a model of the job; without a model, one of any size.

        Args:
            name: a directory, or the name of a Hugging Face hub model that is in the local cache.
            overrides: values that override the model's config.
            adapt: puts LoRA adapters into the model; ``None`` without any.
        """
        if self.options.parameters:
            model = shapes.of_size(self.options.parameters)
            return model if adapt is None else model.frozen()
        directory = Path(self.options.model) if self.options.model else directory_of(name)
        try:
            return shapes.read_model(directory, overrides, adapt)
        except PlanError as error:
            self.refusals.append(error)
            return shapes.of_size("1M")

    def in_force(self, feature: str, group: str) -> bool:
        """Whether the seams of ``group`` would make ``feature`` work in this job."""
        return not self.off and self._predicted.in_force(self.framework, feature, group)

    @cached_property
    def _predicted(self) -> PredictedFeatures:
        return PredictedFeatures(self.settings)

    def launched(self, name: str) -> int | None:
        """Return the value of one of the launcher's options, such as ``nproc-per-node``.

        Raises:
            PlanError: the value, such as torchrun's ``gpu`` (all GPUs of a machine), is no number.
        """
        option = name.replace("-", "[-_]")
        found = re.search(rf"(?<!\S)--?({option})[= ](\S*)", " ".join(self.launcher))
        if found is None:
            return None
        most = found[2].rpartition(":")[2]
        if not most.isdigit():
            raise PlanError(
                f"--{found[1]}={most}: the number of GPUs depends on the machine that the job "
                "starts on. Write a number."
            )
        return int(most)

    @property
    def processes(self) -> int | None:
        """Number of processes that torchrun starts; ``None`` without its options."""
        each = self.launched("nproc-per-node")
        return None if each is None else each * (self.launched("nnodes") or 1)


def read_launch_line(
    words: Sequence[str], known: Iterable[Adapter], settings: Settings, options: Options
) -> Job:
    """Find a job's framework and target in its launch command.

    ``words`` may begin with variables, launchers and ``--``; ``known`` are the frameworks to which
    the target may belong.

    Raises:
        PlanError: no word of the command line is an entry point of a framework.
    """
    by_package = {
        package: framework.framework for framework in known for package in framework.packages
    }
    missing, words = "", unfold(words)
    for place, word in enumerate(words):
        script = word.endswith(".py") and not word.startswith("-") and "=" not in word
        module = place > 0 and words[place - 1] in ("-m", "--module")
        if module or script:
            front = tuple(words[:place])
            rest = list(takewhile(END.__ne__, words[place + 1 :]))
            arguments = tuple(rest[1:] if rest[:1] == ["--"] else rest)
            launch = read_launch(front, arguments)
            source = file_of(word, launch.folder) if module else launch.folder / word
            source = source if source is not None and os.path.isfile(source) else None
            framework = _framework(word, source, by_package)
            if script and source is None and not missing:
                missing = f" There is no file {word} in {launch.folder.resolve()}: start the plan "
                missing += "in the job's directory, or write the whole path."
            if framework:
                facts = (framework, word, source, front, arguments)
                return Job(*facts, settings, options, launch=launch)
    names = ", ".join(sorted(set(by_package.values())))
    raise PlanError(
        f"{' '.join(words)!r}: no word of it is an entry point of a known framework ({names}): "
        "expected a module behind -m, or a script that imports one. Write the line that starts "
        "the job's Python. If it is in a shell script, write `precision-shim plan --` in front of "
        f"it there, and start the script.{missing}"
    )


def file_of(module: str, folder: Path = Path()) -> Path | None:
    """Return a module's file, found without importing the module or its packages.

    ``folder`` is the one in which the job starts.
    """
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place, *rest)
        for candidate in (path.with_suffix(".py"), path / "__main__.py", path / "__init__.py"):
            if candidate.is_file():
                return candidate
    local = Path(folder, *module.split(".")).with_suffix(".py")
    return local if local.is_file() else None


def _framework(target: str, source: Path | None, by_package: Mapping[str, str]) -> str | None:
    imported = [] if source is None else find_imported(source)
    tops = [name.partition(".")[0] for name in imported]
    if not target.endswith(".py"):
        tops.insert(0, target.partition(".")[0])
    tops += re.split(r"[/\\.]", target)
    return next((by_package[name] for name in tops if name in by_package), None)


def find_imported(source: Path) -> list[str]:
    """Return the modules that a file imports; empty if the file cannot be read."""
    try:
        nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    except (OSError, ValueError, SyntaxError):
        return []
    modules = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return modules + [str(node.module) for node in froms]
