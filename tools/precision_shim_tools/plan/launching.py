"""Which variables a launch line gives to a job's driver and to its workers, by its plain words."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precision_shim.errors import PlanError
from precision_shim.process import settings as _settings
from precision_shim.process.carriers import variables
from precision_shim.process.settings import PREFIX

END = ";"
"""The word between two commands of a shell."""

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_IN_FILE = re.compile(rf"^\s*(?:export\s+)?({PREFIX}\w*)\s*=\s*(.*?)\s*(?:\s#.*)?$", re.M)
_IN_CONFIG = re.compile(r"\+*\S*runtime_env\.env_vars\.([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_OPERATORS = "();<>|&\n"
_NO_WORDS = re.compile(r"^\s*#.*$|\\\n|(?<!\S)\d(?=[<>])", re.MULTILINE)
"""Comments, continued lines and the numbers of redirected files in a shell's string."""

_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_SPLIT = re.compile(r"(?:(-[iv0]*)S|--split-string=?)(.*)", re.DOTALL)
_LONG = {"--unset": "-u", "--chdir": "-C", "--argv0": "-a", "--ignore-environment": "-i"}
"""Long names of options of ``env``."""

_RUNTIME_ENV = ("--runtime-env-json", "--runtime-env", "--working-dir")
_ELSEWHERE = (
    *("docker", "podman", "nerdctl", "apptainer", "singularity", "enroot", "kubectl", "sudo"),
    *("ssh", "pdsh", "mpirun", "mpiexec", "ray submit", "ray exec"),
)
"""Launchers whose command may get other variables than this shell's."""

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
        by: the last launcher that changed what the process inherits: ``env``, ``srun``, ``ray`` for
            a Ray job, or what starts the command elsewhere.
        unread: why a part of the line is not known.
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
        elsewhere = f"write env {PREFIX}=1 in front of the command that {self.by} starts"
        others = f"export {PREFIX}=1 where the job starts"
        return _REMEDIES.get(self.by, elsewhere if self.by else others)

    @property
    def doubt(self) -> str:
        """When the shim may be on although the line, as far as it is read, leaves it off."""
        if self.unread:
            return " as far as this line can be read here"
        return ", unless the Ray cluster was started with it" * (self.by == "ray")

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
        if not re.search(r"[$`]", value):
            self.named[name] = value
            self.driver.update(variables({name: value}))
        elif name.startswith(PREFIX):
            self.unread.append(f"{name}={value} is not computed here, so it is left out")

    def text_of(self, path: str, why: str) -> str:
        """Return a file's text; empty, and the file unread, if it is not on this machine."""
        try:
            return (self.folder / path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            self.unread.append(f"{why} {path} cannot be read here, so it is left out: {error}")
            return ""


def unfold(words: Sequence[str]) -> list[str]:
    """Replace a string that a shell, ``env -S`` or ``sbatch --wrap`` executes by its words.

    ``END`` is between two commands of a string.

    Raises:
        PlanError: a shell could not read the string.
    """
    for at, word in enumerate(words):
        name, front, rest = Path(word).name, words[: at + 1], words[at + 1 :]
        if name in _SHELLS:
            for place in _options(rest, ("-o", "+o", "-O")):
                if re.fullmatch(r"-[a-z]*c", rest[place]):
                    return [*words[:at], *unfold(_commands("".join(rest[place + 1 : place + 2])))]
        elif name == "env":
            for place in _options(rest, ("-u", "-C", "-a", "--unset", "--chdir", "--argv0")):
                found = _SPLIT.fullmatch(rest[place])
                if found:
                    text, *after = [found[2]] * bool(found[2]) + [*rest[place + 1 :], ""]
                    flags = [found[1]] * (len(found[1] or "") > 1)
                    split = [*_commands(text), *after[:-1]]
                    return [*front, *rest[:place], *flags, *unfold(split)]
        elif name == "sbatch":
            for place, option in enumerate(rest):
                wrap, equals, text = option.partition("=")
                if wrap == "--wrap":
                    text, *after = [text] * bool(equals) + [*rest[place + 1 :], ""]
                    return [*front, *rest[:place], *after[:-1], *unfold(_commands(text))]
    return list(words)


def _options(words: Sequence[str], valued: Collection[str]) -> Iterator[int]:
    """The places of the options at the start of ``words``; those of ``valued`` take the next."""
    places = iter(range(len(words)))
    for place in places:
        if words[place][:1] not in ("-", "+"):
            return
        yield place
        if words[place] in valued:
            next(places, None)


def _commands(text: str) -> list[str]:
    lexer = shlex.shlex(_NO_WORDS.sub(" ", text), posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    found: list[str] = []
    try:
        for word in lexer:
            if not word or word.strip(_OPERATORS):
                found.append(word)
            elif {*word} & {*"<>"}:
                next(lexer, None)  # the file to which the command writes, or from which it reads
            else:
                found.append(END)
    except ValueError as error:
        raise PlanError(f"{text!r}: a shell could not read it: {error}. Correct it.") from error
    return found


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
    *earlier, last = _split(front)
    for command in earlier:
        _execute(launch, command)
    _Front(launch).follow(last)
    for word in arguments:
        assigned = _IN_CONFIG.fullmatch(word)
        if assigned:
            launch.carried[assigned[1]] = assigned[2].strip("\"'")
        elif PREFIX in word:
            launch.unread.append(f"{word}: what it sets in which process is not known here")
    return launch


class _Front:
    """Follows the words of the command that starts a job, until the job's target."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._launcher = ""
        self._inherited: dict[str, str] = {}
        self._filed: set[str] = set()
        self._here = Path()

    def follow(self, front: Sequence[str]) -> None:
        launch, before, elsewhere = self._launch, "", ""
        words = iter(enumerate(front, 1))
        for after, word in words:
            if self._launcher in _ELSEWHERE:
                elsewhere = self._launcher
                word = re.sub(r"^(-e|-x|--env)=?(?=[A-Z])", "", word)  # noqa: PLW2901
            assigned = _ASSIGNMENT.fullmatch(word)
            if assigned:
                launch.assign(assigned[1], assigned[2])
            elif self._starts(word, before):
                pass
            elif self._launcher != "env":
                self._read_option(word, "".join(front[after : after + 1]))
            elif word.startswith("-"):
                _env(launch, word, words)
            else:
                self._launcher = ""
            before = Path(word).name
        if elsewhere and PREFIX not in launch.driver:
            what = f"whether {elsewhere} passes on {PREFIX}, or sets it"
            launch.unread.append(f"{what}, is not known here")

    def _starts(self, word: str, before: str) -> bool:
        """Whether a word starts a launcher that may change variables."""
        name = Path(word).name
        name = f"ray {name}" if before == "ray" else name
        if name in ("env", "srun", "sbatch"):
            self._launcher = name
        elif word == "submit" and before == "job":
            self._launcher = self._launch.by = "ray"
            self._here = self._launch.folder
            self._launch.driver.clear()
        elif name in _ELSEWHERE:
            self._launcher = self._launch.by = name
            self._inherited = {**self._launch.driver}
            self._launch.driver.clear()
        else:
            return False
        return True

    def _read_option(self, word: str, after: str) -> None:
        launch = self._launch
        option, equals, value = word.partition("=")
        value = value if equals else after
        if self._launcher in _ELSEWHERE and word in self._inherited:  # docker run -e NAME
            launch.driver[word] = self._inherited[word]
        elif option == "--export" and self._launcher in ("srun", "sbatch"):
            launch.by = "srun"
            _export(launch, value.split(","))
        elif option in _RUNTIME_ENV and self._launcher == "ray":
            _runtime_env(launch, option, value, self._here)
        elif option == "--env-file":  # of uv or docker: a file overrides only an earlier file
            for name, found in _IN_FILE.findall(launch.text_of(value, option)):
                if name not in launch.driver or name in self._filed:
                    self._filed.add(name)
                    launch.assign(name, found.strip("\"'"))


def _split(words: Sequence[str]) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    for word in words:
        if word == END:
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def _execute(launch: Launch, command: Sequence[str]) -> None:
    """Follow a command that a shell executes before the job's."""
    name, *words = command or [""]
    if name == "cd":
        launch.folder /= "".join(words[:1])
    elif name == "unset":
        for word in words:
            launch.driver.pop(word, None)
    elif name == "export" and all(map(_ASSIGNMENT.fullmatch, words)):
        for word in words:
            launch.assign(*word.split("=", 1))
    else:
        sources = name in ("source", ".")
        text = launch.text_of("".join(words[:1]), name) if sources else " ".join(command)
        if PREFIX in text:
            launch.unread.append(f"{' '.join(command)}: what it does to {PREFIX} is not known here")


def _env(launch: Launch, option: str, words: Iterator[tuple[int, str]]) -> None:
    """Read an option of ``env``; its value may be the next of ``words``."""
    name, _, value = option.partition("=")
    letters = f"{_LONG[name]}{value}" if name in _LONG else option
    for at, letter in enumerate(letters.removeprefix("-") or "i", 2):
        value = letters[at:]
        if letter in "uCa":
            value = value or next(words, (0, ""))[1]
        if letter == "C":
            launch.folder /= value
        elif letter in "ui":
            launch.by = "env"
            for one in [value] if letter == "u" else [*launch.driver]:
                launch.driver.pop(one, None)
        elif letter not in "av0" and option != "--":
            launch.unread.append(f"env {option}: this option is not known here, so it is left out")
        if letter in "-uCa":
            return


def _export(launch: Launch, names: Sequence[str]) -> None:
    """Read ``--export`` of Slurm: ``ALL``, ``NONE`` or names, each perhaps with a value."""
    before = launch.driver.copy()
    if "ALL" not in map(str.upper, names):
        launch.driver.clear()
    for name, equals, value in (one.partition("=") for one in names):
        if equals:
            launch.assign(name, value)
        elif name in before:
            launch.driver[name] = before[name]


def _runtime_env(launch: Launch, option: str, value: str, here: Path) -> None:
    """Read an option of ``ray job submit``; ``env_vars`` are also those of the job's driver."""
    found: Any = {"working_dir": value}
    try:
        if option == "--runtime-env-json":
            found = json.loads(value)
        elif option == "--runtime-env":
            import yaml

            found = yaml.safe_load((here / value).read_text(encoding="utf-8"))
        given = {str(name): one for name, one in (found.get("env_vars") or {}).items()}
    except Exception as error:  # a file of another machine, or no yaml
        launch.unread.append(f"{option} {value} cannot be read here, so it is left out: {error}")
        return
    for name, one in given.items():
        if isinstance(one, str):
            launch.carried[name] = one
            launch.assign(name, one)
        elif name.startswith(PREFIX):
            told = f'{option}: Ray takes only strings in env_vars: write {name}: "{one}"'
            launch.unread.append(told)
    folder = here / str(found.get("working_dir") or "")
    if found.get("working_dir") and folder.is_dir():
        launch.folder = folder
