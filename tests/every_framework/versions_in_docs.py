"""docs/versions.md: what the shim does, by framework, version, feature and path; and the README.

    python -m tests.every_framework.versions_in_docs FOLDER   # where tox keeps its environments

Each pinned environment's own Python runs the doctor's check, and writes the environment's column. A
framework's tests compare the column of their version with what is installed.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from precision_shim.process.registry import entries, load
from precision_shim.process.settings import FEATURES, resolve
from precision_shim.process.symbols import plain
from precision_shim.reporting import text as _status_text
from precision_shim_tools.predicted import predict_status

from ..environments.record_symbols import pinned

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "versions.md"
WORDS = {
    "pending": "yes",
    "partly pending": "yes, beside its own",
    "native": "its own",
    "refused": "**changed**",
    "unsupported": "refused",
    "absent": "",
}
"""Maps a verdict on paths that nothing has imported to its word in the tables."""

_MEGATRON = r"Megatron(Engine)?( engine| workers| trainers)?|trainer"
GAINS = {
    "`bf16`, `fp16`, `half` as dtype names": ("dtype-coercion", r".*"),
    "bf16 Adam states": ("bf16-dispatch", _MEGATRON),
    "bf16 gradient bucket": ("grad-bucket-alignment", _MEGATRON),
    "fp16 with loss scale and exact resume": ("fp16-scaling", rf"{_MEGATRON}|[\w -]+"),
    "vLLM and SGLang in the trainer's dtype": ("rollout-agreement", r".*(driver|generator).*"),
}
"""Columns of the README's table: each gain's feature, and a pattern of the paths that count."""

_ENGINES = {
    r"^legacy |( engine|Engine| workers| trainers| v\d| value workers)+$": "",
    r"^trainer$": "Megatron",
    r"^(varlen attention|Megatron-FSDP|RL trainer and generator)$": "",
}
"""Maps a pattern in a path to what stands for it in the README's table."""

Column = dict[tuple[str, str], str]
"""Maps feature and path to a word of the table."""


def column(framework: str) -> tuple[str, Column]:
    """The installed version, and its column of the table."""
    entry = entries(third_party=False)[framework]
    one, _ = predict_status(entry, resolve(environ={}))
    assert one.version is not None, f"{framework} is not installed here"
    found = {
        # A seam without a path serves all paths.
        (feature, path or "everywhere"): WORDS[verdict]
        for (feature, path), verdict in _status_text.verdicts(one.seams).items()
    }
    return plain(one.version), {key: word for key, word in found.items() if word}


def hold(framework: str) -> None:
    """Assert that the page shows the installed version's column."""
    version, found = column(framework)
    tested = load(entries(third_party=False)[framework]).tested
    if version not in tested:
        pytest.skip(f"{framework} {version} is no tested version, and has no column")
    assert read_columns(PAGE.read_text(encoding="utf-8"), framework).get(version) == found, (
        "docs/versions.md is not current: python -m tests.every_framework.versions_in_docs FOLDER"
    )


def read_columns(page: str, framework: str) -> dict[str, Column]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page[slice(*_block(page, framework))].splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]
    columns: dict[str, Column] = {version: {} for version in rows[0][2:]} if rows else {}
    feature = ""
    for row in rows[1:]:
        feature = row[0] or feature
        for version, word in zip(columns, row[2:], strict=True):
            if word:
                columns[version][feature, row[1]] = word
    return columns


def gains(page: str) -> list[str]:
    """The README's table: what the shim adds, by framework and by versions with the same cells."""
    table = ["| | " + " | ".join(GAINS) + " |", "|---" * (len(GAINS) + 1) + "|"]
    for framework in re.findall(r"<!-- versions:(\S+) -->", page):
        rows: dict[str, list[str]] = {}
        for version, words in read_columns(page, framework).items():
            cells = " | ".join(_gain(words, *gain) for gain in GAINS.values())
            rows.setdefault(cells, []).append(re.sub(r"rc\d+$", "", version))
        title = re.findall(rf"## (\S+)\n\n<!-- versions:{framework} -->", page)[0]
        name = f"[{title}](docs/start/{framework}.md)"
        table += [f"| {name} {', '.join(each)} | {cells} |" for cells, each in rows.items()]
    return table


def _gain(words: Column, feature: str, paths: str) -> str:
    """The engines where the shim does it; ``yes`` if no engine is named; ``*`` beside a part."""
    found: dict[str, bool] = {}
    for (name, path), word in words.items():
        if name == feature and re.fullmatch(paths, path) and word.startswith("yes"):
            engine = path if paths != r".*" and "driver" not in paths else ""
            for pattern, short in _ENGINES.items():
                engine = re.sub(pattern, short, engine)
            found[engine] = found.get(engine, False) or word != "yes"
    engines = [(each or "yes") + r"\*" * part for each, part in found.items()]
    return ", ".join(one for one in engines if one != "yes" or len(engines) == 1)


def written(page: str, framework: str, columns: dict[str, Column]) -> str:
    """The page with this framework's table replaced."""
    versions = sorted(columns, key=Version)
    keys = {key for one in columns.values() for key in one}
    lines = [f"| feature | path | {' | '.join(versions)} |", "|---" * (len(versions) + 2) + "|"]
    for feature in FEATURES:
        shown = feature
        for key in sorted(key for key in keys if key[0] == feature):
            cells = " | ".join(columns[version].get(key, "") for version in versions)
            lines.append(f"| {shown} | {key[1]} | {cells} |")
            shown = ""
    start, end = _block(page, framework)
    return page[:start] + "\n".join(["", *lines, ""]) + page[end:]


def _block(page: str, framework: str) -> tuple[int, int]:
    found = re.search(f"<!-- versions:{framework} -->(.*?)<!-- /versions -->", page, re.DOTALL)
    assert found, f"docs/versions.md has no table of {framework}"
    return found.span(1)


def main() -> int:
    """Let each environment write its column; returns how many environments are missing."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".tox"
    paths = os.pathsep.join(
        [str(ROOT), *(str(ROOT / one) for one in ("shim", "adapters", "tools"))]
    )
    missing = 0
    made: dict[str, dict[str, Column]] = {}
    for name in pinned():
        python = folder / name / "bin" / "python"
        if not python.exists():
            print(f"not in {folder}: {name}", file=sys.stderr)
            missing += 1
            continue
        framework = name.rpartition("-")[0]
        module = "tests.every_framework.versions_in_docs"
        code = f"from {module} import column; print(repr(column({framework!r})))"
        said = subprocess.run(
            [str(python), "-c", code],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        version, found = ast.literal_eval(said.stdout.splitlines()[-1])
        made.setdefault(framework, {})[version] = found
    page = PAGE.read_text(encoding="utf-8")
    for framework, columns in made.items():
        page = written(page, framework, read_columns(page, framework) | columns)
    PAGE.write_text(page, encoding="utf-8")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    start = text.index("\n\n| | ") + 2
    end = text.index("\n\n", start)
    readme.write_text(text[:start] + "\n".join(gains(page)) + text[end:], encoding="utf-8")
    return missing


if __name__ == "__main__":
    raise SystemExit(main())
