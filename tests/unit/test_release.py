"""The release's checklist, run on repositories that the tests make."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.0] - 2026-01-02\n\n- a\n")
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.0\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "a")
    git(tmp_path, "tag", "v1.2.0")
    return tmp_path


def test_what_is_ready(
    release: ModuleType, ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main(["--dry-run"], ready) == 0
    said = capsys.readouterr().out
    assert "NO" not in said
    assert all(f"--  {name}: {command}" in said for name, command in release.COMMANDS)
    assert said.splitlines()[-1].startswith("upload with: ")


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("new.txt", "", "working tree"),
        ("CHANGELOG.md", "## [1.2.0] - 2999-01-01\n", "CHANGELOG.md"),
        ("CHANGELOG.md", "## [1.2.0]\n", "CHANGELOG.md"),
        ("CHANGELOG.md", "## [Unreleased]\n\n## [1.2.0] - 2026-01-02\n", "CHANGELOG.md"),
        ("CITATION.cff", "version: 1.1.0\n", "CITATION.cff"),
    ],
)
def test_what_is_not(
    release: ModuleType,
    ready: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    text: str,
    name: str,
) -> None:
    (ready / file).write_text(text)
    assert release.main([], ready) == 1  # and runs no command
    said = capsys.readouterr().out
    assert f"  NO  {name}: " in said
    assert "no release" in said


@pytest.mark.parametrize("tags", [[], ["latest"], ["v1.2"], ["v1.2.0", "v1.3.0"]])
def test_no_tag_or_two(
    release: ModuleType, ready: Path, capsys: pytest.CaptureFixture[str], tags: list[str]
) -> None:
    git(ready, "tag", "-d", "v1.2.0")
    for one in tags:
        git(ready, "tag", one)
    assert release.main([], ready) == 1
    assert f"  NO  tag: this commit has the tags {tags}" in capsys.readouterr().out


@pytest.mark.parametrize(("built", "status"), [("1.2.0", 0), ("1.2.0.dev3", 1)])
def test_the_wheel_has_the_tags_version(
    release: ModuleType, ready: Path, monkeypatch: pytest.MonkeyPatch, built: str, status: int
) -> None:
    (ready / ".git/info/exclude").write_text("dist/\n")
    made = f"mkdir dist && touch dist/precision_shim-{built}-py3-none-any.whl"
    monkeypatch.setattr(release, "COMMANDS", (("build", made),))
    assert release.main([], ready) == status


def test_on_this_repository(release: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The checklist runs at any time; its verdict depends on the state of the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    assert release.main(["--dry-run"]) in (0, 1)
    assert capsys.readouterr().out.startswith("precision_shim ")
