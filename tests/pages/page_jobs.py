"""The training jobs in README and docs, each completed to the command that would run.

A job is a command that contains a framework's entry point, with any launcher in front. A command
that consists of settings only is added to the job above it on its page. ``...`` means the settings
of a job on the framework's start page. The first job on that page with the same entry point and
config is taken, or else the first with the same entry point. The command's own settings override
the settings of that job.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .documented import PAGES, ROOT, SETTING, commands

ENTRIES = {
    "verl.trainer.main_ppo": "verl",
    "skyrl.train.entrypoints.main_base": "skyrl",
    "examples/run_grpo.py": "nemo-rl",
    "torchtitan.train": "torchtitan",
    "torchtitan.experiments.rl.train": "torchtitan",
    "examples/math/gsm8k_rl.py": "areal",
    "sft": "ms-swift",  # behind its command megatron
    "rlhf": "ms-swift",
    "examples/start_rlvr_pipeline.py": "roll",
}
"""Maps each entry point on the pages to its framework."""

_CONFIGS = ("--config", "--config-name", "--module")
"""Options that select the config to which a job's settings apply."""


@dataclass(frozen=True)
class Job:
    """A job on a page.

    Attributes:
        page: the page's path, from the root of the repository.
        shown: the command on the page, joined to one line.
        framework: as users write it.
        launcher: the words before the entry point.
        entry: the module or script that the command starts.
        settings: the words after the entry point, completed.
    """

    page: str
    shown: str
    framework: str
    launcher: tuple[str, ...]
    entry: str
    settings: tuple[str, ...]

    def __str__(self) -> str:
        """A test's name: the page, and the job's number on it."""
        number = [one.shown for one in jobs() if one.page == self.page].index(self.shown)
        return f"{self.page}:{number}"

    def value(self, key: str) -> str | None:
        """The value that the job sets for a key; the last setting wins."""
        found = [value for name, value in _pairs(self.settings) if _key(name) == key]
        return found[-1] if found else None


def of(framework: str) -> list[Job]:
    """The jobs of a framework on all pages, in the order of the pages."""
    found = [one for one in jobs() if one.framework == framework]
    assert found, f"no page has a job of {framework}"
    return found


@cache
def jobs() -> tuple[Job, ...]:
    return tuple(one for page in PAGES for one in on_page(page))


def on_page(page: Path) -> Iterator[Job]:
    """The jobs of one page, in order."""
    where = page.relative_to(ROOT).as_posix()
    above: Job | None = None
    for shown in commands(page):
        words = shlex.split(shown)
        entry = next((one for one in words if one in ENTRIES), None)
        if entry is not None:
            at = words.index(entry)
            settings = tuple(words[at + 1 :])
            if "..." in settings:
                settings = _completed(entry, settings)
            launcher = tuple(words[:at])
            yield (above := Job(where, shown, ENTRIES[entry], launcher, entry, settings))
        elif SETTING.match(shown):
            assert above is not None, f"{where}: these settings have no job above them: {shown}"
            settings = (*above.settings, *words)
            yield Job(where, shown, above.framework, above.launcher, above.entry, settings)


def _completed(entry: str, settings: tuple[str, ...]) -> tuple[str, ...]:
    """The settings with ``...`` replaced by those of the start page's job."""
    start = ROOT / "docs" / "start" / f"{ENTRIES[entry]}.md"
    own = _pairs([word for word in settings if word != "..."])
    said = {_key(name) for name, _ in own}
    bases = [_pairs(job.settings) for job in on_page(start) if job.entry == entry]
    assert bases, f"{start} starts no {entry}"
    base = next((one for one in bases if _config(one) == _config(own)), bases[0])
    more = [_word(*one) for one in base if _key(one[0]) not in said]
    at = settings.index("...")
    return (*settings[:at], *more, *settings[at + 1 :])


def _config(pairs: list[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    return [(name, value) for name, value in pairs if name in _CONFIGS]


def _pairs(words: Iterable[str]) -> list[tuple[str, str | None]]:
    """Names and values from ``name=value``, ``--name value`` and ``--flag``."""
    found: list[tuple[str, str | None]] = []
    waits = False
    for word in words:
        name, equals, value = word.partition("=")
        if waits and not word.startswith("-"):
            found[-1] = (found[-1][0], word)
            waits = False
        else:
            found.append((name, value if equals else None))
            waits = word.startswith("--") and not equals
    return found


def _word(name: str, value: str | None) -> str:
    return name if value is None else f"{name}={value}"


def _key(name: str) -> str:
    return re.sub(r"^(\+{1,2}|--)", "", name)
