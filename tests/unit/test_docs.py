"""README and docs compared with the code: versions, settings, pages and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from precision_shim.process.framework import Adapter
from precision_shim.process.settings import FEATURES, PREFIX, TABLE
from precision_shim_adapters.frameworks import FRAMEWORKS

from .. import messages

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("declared", FRAMEWORKS, ids=lambda one: one.framework)
def test_the_readme_has_the_tested_versions(declared: Adapter) -> None:
    name, versions = declared.framework, declared.tested
    # A tag's package may state a version with a suffix: tag 0.5.0 states 0.5.0rc0.
    expected = ", ".join(re.sub(r"rc\d+$", "", version) for version in versions)
    page = "megatron.md#any-other-trainer" if name == "megatron" else f"start/{name}.md"
    line = re.escape(f"(docs/{page})** {expected}:")
    assert re.search(line, text_of("README.md"))


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


def test_each_word_of_the_page_of_versions_stands_in_a_cell() -> None:
    legend, _, tables = text_of("docs/versions.md").partition("\n## ")
    words = [row.split("|")[1].strip() for row in re.findall(r"^\| [a-z].*$", legend, re.MULTILINE)]
    assert len(words) == 4
    cells = {cell.strip() for row in tables.splitlines() for cell in row.split("|")}
    assert [word for word in words if word not in cells] == []


def test_every_page_is_in_the_site() -> None:
    index = text_of("docs/index.md")
    for page in PAGES:
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        assert name == "index" or re.search(rf"^{name}$", index, re.MULTILINE), name


@pytest.mark.parametrize("page", ["plan", "checkpoints", "audit", "lost-updates"])
def test_pages_with_real_output_are_linked_from_the_first(page: str) -> None:
    assert f"]({page}.md)" in text_of("docs/index.md")


def test_a_start_page_is_two_screens() -> None:
    for page in (ROOT / "docs" / "start").glob("*.md"):
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 80, page.name


PASSED_ON = {
    "precision_shim/reporting/journal.py": "what it is given",
    "precision_shim/process/settings.py": "the error of a value, behind the argument that has it",
    "precision_shim/adapting.py": "what an adapter gives it, and the errors of settings",
    "precision_shim/auditing/sending.py": "what is wrong with a wire: docs/audit.md has it",
    "precision_shim/auditing/watching.py": "the audit's problems, which docs/audit.md has",
    "precision_shim/scaling/checkpoint.py": "the error of the first rank that has one",
    "precision_shim_adapters/fp16/training.py": "the errors of the scaler's record",
    "precision_shim_adapters/megatron/acting/ddp.py": "a part that is listed",
    "precision_shim_adapters/megatron/acting/optimizer.py": "parts that are listed",
    "precision_shim_adapters/rollout/head.py": "parts that are listed",
    "precision_shim_adapters/rollout/telling.py": "parts that are listed",
    "precision_shim_adapters/rollout/wire.py": "parts that are listed",
    "precision_shim_adapters/torchtitan/checkpoints.py": "the error of rank 0, on the others",
    "precision_shim_adapters/verl/fsdp.py": "parts that are listed",
    "precision_shim_adapters/verl/driver.py": "a text of its weight sync",
    "precision_shim_adapters/verl/sync.py": "a part that is listed",
}
"""Maps each file that passes on a message made elsewhere to the kind of message."""


def test_every_message_is_listed() -> None:
    found, elsewhere = messages.messages()
    page = text_of("docs/troubleshooting.md")
    block = page.split(messages.BEGIN)[1].split(messages.END)[0]
    assert block == messages.listed(found), "python -m tests.messages writes the list anew"
    assert {place.partition(":")[0] for place in elsewhere} == set(PASSED_ON)


def test_messages_stand_under_what_they_are_about() -> None:
    found, _ = messages.messages()
    headings = {one.text: one.group for one in found}
    for kind, about in messages.OF_AN_ERROR.items():
        assert about in messages.HEADINGS
        assert any(kind == one.kind for one in found), f"no {kind} is left: take it out"
    for part, about in messages.OF_A_TEXT.items():
        assert about in {headings[text] for text in headings if part in text}, part
    # Each class in this list has errors about one subject only.
    for kind in (
        "ScalerCheckpointError",
        "LossScaleError",
        "CheckpointUnreadableError",
        "PlanError",
    ):
        assert {one.group for one in found if one.kind == kind} == {messages.OF_AN_ERROR[kind]}
    with pytest.raises(LookupError, match="declare what it is about"):
        messages.heading("warning", "a warning that nobody has filed")


def test_the_start_page_of_verl_quotes_the_decision_that_its_job_gets() -> None:
    torch = pytest.importorskip("torch")
    from precision_shim.precision.model import TrainableDtypes
    from precision_shim_adapters.megatron.deciding.legality import FusedAdamSupport
    from precision_shim_adapters.megatron.deciding.requested import InForce, RequestedConfig
    from precision_shim_adapters.megatron.deciding.table import plan_optimizer

    page = text_of("docs/start/verl.md")
    fields = re.findall(r"\+\S*override_optimizer_config\.(\w+)=(\S+)", page)
    values = {"true": True, "0.95": 0.95}
    # verl 0.9 has its own fields for the states, so `auto` leaves the states to the config.
    asked = RequestedConfig(asked={k: values.get(v, v) for k, v in fields}, auto="as-configured")
    model = TrainableDtypes({torch.bfloat16: 8})
    made = plan_optimizer(asked, model, InForce(support=FusedAdamSupport((2, 14), True, "")))
    assert f"bf16-dispatch: {made.chosen} ({made.because}) " in " ".join(page.split())
