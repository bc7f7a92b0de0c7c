"""The text of ``status()`` in a real worker: it fits a screen, and the docs show it.

The imported modules determine what is in force and what waits. The worker is therefore built in its
own process: a second pytest runs ``status_worker.py`` of the framework's tests, with their
fixtures. The docs contain the text for the newest pinned version, between two markers.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import precision_shim

from ..processes.commands import python
from ..processes.rank_server import Ranks

ROOT = Path(__file__).parents[2]
_FILE = "STATUS_IN_DOCS"
_END = "<!-- /status -->"


def tell() -> None:
    """Write the text from the worker's process, and check that every path has a name for users.

    The framework's version is written without a build's addition ("+" and a commit). A worker that
    measures no lost updates has not imported the meter.
    """
    from precision_shim.process.registry import entries

    status = precision_shim.status()
    known = entries(third_party=False)
    for name, one in status.frameworks.items():
        if one.seams:
            declared = set(known[name].paths.values())
            undeclared = {seam.path for seam in one.seams} - declared
            assert not undeclared, f"{name}: not in the adapter's paths: {sorted(undeclared)}"
    text = re.sub(r"^([\w-]+ [\d.]\w*[^ ,+]*)\+\w+", r"\1", str(status), flags=re.MULTILINE)
    assert not [name for name in sys.modules if name.startswith("precision_shim_tools.updates")]
    Path(os.environ[_FILE]).write_text(text + "\n", encoding="utf-8")


def of_a_worker(script: Path, folder: Path, ranks: Ranks | None = None) -> str:
    """The text of ``status()`` in a process in which ``script`` has built its worker.

    Args:
        script: a file of tests.
        folder: an empty one.
        ranks: the server that forks the process, with the case ``tests``; ``None``: a new Python.
    """
    file = folder / "status.txt"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    environment[_FILE] = str(file)
    options = ["-q", "-p", "no:cacheprovider", str(script)]
    if ranks is not None:
        ranks("tests", world=1, arguments=options, environment=environment, cwd=str(ROOT))
        said = ranks.said[0]
    else:
        ended = python("-m", "pytest", *options, cwd=ROOT, **{_FILE: str(file)})
        said = ended.stdout + ended.stderr
    assert file.exists(), said
    return file.read_text(encoding="utf-8")


def hold(text: str, framework: str, environment: str, request: pytest.FixtureRequest) -> None:
    """Assert that the text fits a screen, and that the framework's docs contain it.

    Args:
        text: from :func:`of_a_worker`.
        framework: the name that users write, which also names the markers and the file in ``docs``.
        environment: the tox environment that has the installed version.
        request: pytest's request, for the calling test's file and for ``--write-docs``.
    """
    lines = text.splitlines()
    assert len(lines) <= 40, text
    assert max(map(len, lines)) <= 80, text
    if environment not in newest():
        return
    docs = ROOT / "docs" / f"{framework}.md"
    whole = docs.read_text(encoding="utf-8")
    begin = f"<!-- status:{framework} -->"
    before, found, rest = whole.partition(begin)
    held, ended, after = rest.partition(_END)
    assert found, f"{docs.name} lacks {begin}"
    assert ended, f"{docs.name} lacks {_END}"
    wanted = f"\n```text\n{text}```\n"
    if request.config.getoption("--write-docs"):
        docs.write_text(before + begin + wanted + _END + after, encoding="utf-8")
        return
    test = request.path.relative_to(ROOT).as_posix()
    update = f"tox run -e {environment} -- {test} --write-docs"
    assert held == wanted, f"docs/{docs.name} shows another status(); write it anew: {update}"


def newest() -> set[str]:
    """The tox environments of each framework's newest pinned version."""
    from packaging.version import Version

    found: dict[str, Version] = {}
    for file in (ROOT / "tests" / "environments").glob("*-[0-9]*.txt"):
        name, _, version = file.stem.rpartition("-")
        if not re.search(r"\d", name):  # skip verl-0.9.1-core0.19.2: two other pins
            found[name] = max(Version(version), found.get(name, Version(version)))
    return {f"{name}-{version}" for name, version in found.items()}
