"""README, CHANGELOG and docs compared with the code: versions, settings and pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.version import Version

import precision_shim
from precision_shim.process.settings import FEATURES, PREFIX, TABLE
from precision_shim_adapters.frameworks import FRAMEWORKS

from ..every_framework.versions_in_docs import PAGE, gains

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_has_what_the_shim_adds_on_each_tested_version() -> None:
    readme, table = text_of("README.md"), gains(PAGE.read_text(encoding="utf-8"))
    assert "\n".join(["", *table, ""]) in readme
    for declared in FRAMEWORKS:
        # A tag's package may state a version with a suffix: tag 0.5.0 states 0.5.0rc0.
        versions = [re.sub(r"rc\d+$", "", version) for version in declared.tested]
        rows = [row for row in table if f"/{declared.framework}.md)" in row]
        where = " ".join(rows) if declared.framework != "megatron" else readme
        assert all(re.search(rf"[ ,]{re.escape(version)}[ ,:]", where) for version in versions)


def test_changelog_citation_and_a_tags_package_name_one_version() -> None:
    (newest, *_) = re.findall(r"^## \[(\d.*?)\] - ", text_of("CHANGELOG.md"), re.MULTILINE)
    assert re.findall(r"^version: (.+)$", text_of("CITATION.cff"), re.MULTILINE) == [newest]
    if Version(precision_shim.__version__).local is None:  # built from a tag
        assert precision_shim.__version__ == newest


def test_the_page_of_settings_has_all_of_them() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", text_of("docs/settings.md"), re.MULTILINE)
    )
    names = {setting.variable: str(setting.default) for setting in TABLE.values()}
    assert set(rows) == {*names, PREFIX, f"{PREFIX}_FEATURES", f"{PREFIX}_FRAMEWORKS"}
    for name, default in names.items():
        assert rows[name].strip("`").split(":")[0] in (default, default.removesuffix(".0"), "unset")
    for feature in FEATURES:
        assert f"`{feature}`" in text_of("docs/settings.md")


@pytest.mark.parametrize("page", [*OTHERS, *PAGES], ids=lambda one: one.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_site() -> None:
    index = text_of("docs/index.md")
    for page in PAGES:
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        assert name == "index" or re.search(rf"^{name}$", index, re.MULTILINE), name
