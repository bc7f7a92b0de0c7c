"""docs/adding-a-framework.md shows the adapters as they are, and they stay small."""

from __future__ import annotations

import re

import pytest

from .conftest import SITE

PAGE = SITE.parents[2] / "docs" / "adding-a-framework.md"


@pytest.mark.parametrize("name", ["tinytron_shim.py", "tinyfsdp_shim.py"])
def test_the_page_shows_the_adapter(name: str, request: pytest.FixtureRequest) -> None:
    code = (SITE / name).read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 80
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- file: tests/worked/site/{name} -->\n", "<!-- /file -->"
    before, found, rest = page.partition(begin)
    assert found, f"{PAGE.name} lacks {begin}"
    held, _, after = rest.partition(end)
    wanted = f"```python\n{code}```\n"
    if request.config.getoption("--write-docs"):
        PAGE.write_text(before + begin + wanted + end + after, encoding="utf-8")
        return
    assert held == wanted, f"write it anew: pytest {request.node.nodeid} --write-docs"


def test_the_trainers_know_nothing_of_the_shim() -> None:
    for file in SITE.glob("*/*.py"):
        assert not re.search(r"import precision_shim|from precision_shim", file.read_text("utf-8"))
