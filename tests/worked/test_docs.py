"""docs/adding-a-framework.md shows the adapters unchanged, and they stay small."""

from __future__ import annotations

import inspect
import re

import pytest

from precision_shim_adapters.megatron import RequestedConfig

from .conftest import SITE

PAGE = SITE.parents[2] / "docs" / "adding-a-framework.md"


ROOT = PAGE.parents[1]
SHOWN = (
    "tests/worked/site/tinytron_shim.py",
    "tests/worked/site/tinyfsdp_shim.py",
    "adapters/precision_shim_adapters/slime.py",
)


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_the_adapter(name: str, request: pytest.FixtureRequest) -> None:
    code = (ROOT / name).read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 80
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- file: {name} -->\n", "<!-- /file -->"
    before, found, rest = page.partition(begin)
    assert found, f"{PAGE.name} lacks {begin}"
    held, _, after = rest.partition(end)
    wanted = f"```python\n{code}```\n"
    if request.config.getoption("--write-docs"):
        PAGE.write_text(before + begin + wanted + end + after, encoding="utf-8")
        return
    assert held == wanted, f"write it anew: pytest {request.node.nodeid} --write-docs"


def test_the_page_names_all_that_an_adapter_needs() -> None:
    """The page mentions each name that slime's adapter takes from this package."""
    code = (ROOT / SHOWN[2]).read_text(encoding="utf-8")
    prose = re.sub(r"```python\n.*?```", "", PAGE.read_text("utf-8"), flags=re.DOTALL)
    page = PAGE.read_text("utf-8").replace(code, "")
    used = set(re.findall(r"megatron\.(\w+)", code)) - {"core"}
    assert used
    assert not [name for name in used if name not in page]
    fields = re.findall(r"^    (\w+): ", inspect.getsource(RequestedConfig), flags=re.MULTILINE)
    assert not [name for name in fields if f"`{name}`" not in prose]


def test_the_trainers_know_nothing_of_the_shim() -> None:
    for file in SITE.glob("*/*.py"):
        assert not re.search(r"import precision_shim|from precision_shim", file.read_text("utf-8"))
