"""What a framework's driver says and does about the dtypes of trainer and rollout.

``tests/<framework>/test_both_sides.py`` derives a class from the classes here, and has a fixture
``sides``: the framework's :class:`Sides`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

import precision_shim
from precision_shim.errors import DtypeError, UnsupportedPrecisionError

from ..processes.commands import command
from ..stand_ins.planted_engines import plant
from .shim_warnings import watched

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
SHORT = {name: name for name in DTYPES}
PAIRS = (("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp16"), ("fp32", "bf16"))
LOST = ("fp16", "bf16")
"""The one pair in which the rollout lacks what the trainer has."""

FOLLOW = {"rollout": "follow"}


class StopError(Exception):
    """Raised where a driver would ask for GPUs or start a worker."""


def stop(*args: Any, **named: Any) -> None:
    """Stand in for what comes after the driver's decisions."""
    raise StopError


@dataclass(frozen=True)
class Started:
    """What a driver made, said and decided.

    Attributes:
        made: the config, or the driver.
        told: the shim's warnings.
        chosen: each decision, by its subject.
        notes: the decisions as the plan writes them.
    """

    made: Any
    told: list[str]
    chosen: dict[str, str]
    notes: list[str]


class Sides:
    """A framework's driver, from a job to the dtype with which the rollout's engine starts.

    Attributes:
        framework: as users write it.
        model: what the messages call the trained model.
        key: the key of the rollout's dtype.
        names: the names of dtypes that the shim hands to the framework.
        written: bf16 as a job may write it without the shim.
    """

    framework: ClassVar[str]
    model: ClassVar[str] = "actor"
    names: ClassVar[dict[str, str]] = DTYPES
    written: ClassVar[str] = "bfloat16"
    key: str

    def job(self, trainer: str, rollout: str, *more: str) -> Any:
        """A job whose trainer and rollout have these dtypes, as ``run`` takes it."""
        raise NotImplementedError

    def run(self, job: Any) -> Any:
        """Run the framework's driver until it would start a worker."""
        raise NotImplementedError

    def handed(self, made: Any) -> str:
        """The dtype with which the driver starts the rollout's engine."""
        raise NotImplementedError

    def served_in_fp32(self) -> Any:
        """A job whose rollout alone computes its LM head in fp32, for ``NoHead``."""
        raise NotImplementedError

    def line(self, job: Any) -> Sequence[str]:
        """The job's launch line."""
        raise NotImplementedError

    def start(self, job: Any) -> Started:
        made, told = watched(lambda: self.run(job))
        found = [
            one
            for one in precision_shim.status().decisions
            if (one.framework, one.feature) == (self.framework, "rollout-agreement")
        ]
        notes = [f"{one.subject}: rollout-agreement: {one.chosen} ({one.because})" for one in found]
        return Started(made, told, {one.subject: one.chosen for one in found}, notes)

    def beside(self, trainer: str, rollout: str) -> str:
        """The decision on a rollout."""
        same = trainer == rollout
        return f"{rollout}, as the {self.model}" if same else self.apart(trainer, rollout)

    def apart(self, trainer: str, rollout: str) -> str:
        return f"{rollout} beside the {self.model}'s {trainer}"


def plan_of(line: Sequence[str]) -> dict[str, Any]:
    """What the command ``plan`` says of a launch line."""
    ended = command("plan", "--json", "--parameters", "1M", "--", *line)
    assert ended.code in (0, 1), ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def of_plan(
    line: Sequence[str], code: str = "rollout-dtype", about: str = "rollout-agreement"
) -> tuple[list[str], list[str]]:
    """The plan's problems of a kind, as warnings say them, and its notes on the same."""
    found = plan_of(line)
    problems = [one for one in found["problems"] if one["code"] == code]
    lines = [f"{one['message']}. {one['remedy']}" for one in problems]
    return lines, [one for one in found["notes"] if about in one]


each_pair = pytest.mark.parametrize(
    ("trainer", "rollout"),
    [pytest.param(*pair, marks=[] if pair == LOST else pytest.mark.slow) for pair in PAIRS],
)
each_setting = pytest.mark.parametrize("follow", [False, True], ids=["tell", "follow"])


class BothSides:
    """The driver tells of two dtypes that differ, or writes the trainer's over the rollout's."""

    @each_setting
    @each_pair
    def test_the_driver_tells_or_writes(
        self, shim: Any, sides: Sides, trainer: str, rollout: str, follow: bool
    ) -> None:
        shim(frameworks=sides.framework, settings=FOLLOW if follow else {}, export=False)
        job = sides.job(trainer, rollout)
        found = sides.start(job)
        computes = trainer if follow else rollout
        assert sides.handed(found.made) == sides.names[computes]
        replaced = f"{sides.key}: {sides.names[rollout]} -> {sides.names[trainer]}"
        chosen = {"rollout": sides.beside(trainer, computes)}
        assert found.chosen == chosen | ({"dtype keys": replaced} if computes != rollout else {})
        assert len(found.told) == ((trainer, computes) == LOST)
        for text in found.told:
            first = rf"{sides.framework} \d\S+: the {sides.model} computes in fp16 \([^)]+\), "
            assert re.match(rf"{first}the rollout in bf16 \({sides.key}", text)
            remedy = f"Write {sides.key}={sides.names['fp16']}, or set PRECISION_SHIM_ROLLOUT="
            assert remedy in text
            assert sides.start(job).told == []  # said once, though a config may be read often

    def test_strict(self, shim: Any, sides: Sides) -> None:
        shim(frameworks=sides.framework, strict=True, export=False)
        remedy = f"Write {sides.key}={sides.names['fp16']}"
        with pytest.raises(UnsupportedPrecisionError, match=re.escape(remedy)):
            sides.run(sides.job("fp16", "bf16"))
        assert sides.start(sides.job("fp16", "fp16")).told == []

    def test_off_nothing_is_said_or_written(self, shim: Any, sides: Sides) -> None:
        off = "-rollout-agreement"
        shim(frameworks=sides.framework, features=off, settings=FOLLOW, export=False)
        found = sides.start(sides.job("fp16", sides.written))
        expected = (sides.written, [], {})
        assert (sides.handed(found.made), found.told, found.chosen) == expected


class Names:
    """The driver takes all spellings of a dtype, and refuses what is none."""

    def test_names(self, shim: Any, sides: Sides) -> None:
        shim(frameworks=sides.framework, strict=True, export=False)
        for spelt in ("Half", "torch.FLOAT16"):
            assert sides.handed(sides.run(sides.job("fp16", spelt))) == "float16"
        with pytest.raises(DtypeError, match=rf"{sides.framework} \d.*: {sides.key}='fp61' is no"):
            sides.run(sides.job("fp16", "fp61"))
        if type(sides).line is not Sides.line:  # the plan reads this framework's jobs
            precision_shim.uninstall()  # the command runs in a process without the shim
            found = plan_of(sides.line(sides.job("fp16", "fp61")))["problems"]
            assert [one["key"] for one in found if one["code"] == "dtype"] == [sides.key]


class Planned:
    """The plan and the driver say the same."""

    @pytest.mark.slow
    @each_setting
    @each_pair
    def test_the_plan_says_what_the_driver_says(
        self,
        shim: Any,
        monkeypatch: pytest.MonkeyPatch,
        sides: Sides,
        trainer: str,
        rollout: str,
        follow: bool,
    ) -> None:
        monkeypatch.setenv("PRECISION_SHIM_ROLLOUT", "follow" if follow else "tell")
        job = sides.job(trainer, rollout)
        planned = of_plan(sides.line(job))
        shim(frameworks=sides.framework, settings=FOLLOW if follow else {}, export=False)
        found = sides.start(job)
        assert planned == (found.told, found.notes)


@dataclass(frozen=True)
class Row:
    """A job that only one framework has, and what its driver makes of it.

    Attributes:
        job: the words of the job, first the dtypes of trainer and rollout; "-" is none.
        chosen: each decision, by its subject; a text is the decision on the rollout.
        told: a part of each warning.
        handed: what the rollout starts with, unless it is the first word of the decision.
        follow: the keys that the user makes the driver write; ``None`` if the user does not ask.
        because: a part of the decisions' reasons.
        model: the keys of the model's config.
    """

    job: str
    chosen: dict[str, str] | str
    told: tuple[str, ...] = ()
    handed: str = ""
    follow: str | None = None
    because: str = ""
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def decided(self) -> dict[str, str]:
        chosen = {"rollout": self.chosen} if isinstance(self.chosen, str) else self.chosen
        return {**chosen, **({"dtype keys": self.follow} if self.follow else {})}


def each(**rows: Row) -> pytest.MarkDecorator:
    """Parametrize a class derived from ``Rows``; the names of slow rows begin with ``slow_``."""
    slow = {True: [pytest.mark.slow], False: []}
    params = [
        pytest.param(row, id=name, marks=slow[name.startswith("slow_")])
        for name, row in rows.items()
    ]
    return pytest.mark.parametrize("row", params)


class Rows:
    """What the driver hands on, decides and says of a job, and what the plan says."""

    planned: ClassVar[bool] = False

    def test_a_job(
        self, shim: Any, monkeypatch: pytest.MonkeyPatch, sides: Sides, row: Row
    ) -> None:
        monkeypatch.setenv("PRECISION_SHIM_ROLLOUT", "tell" if row.follow is None else "follow")
        job = sides.job(*(word.strip("-") for word in row.job.split()), **row.model)
        planned = of_plan(sides.line(job)) if self.planned else None
        shim(frameworks=sides.framework, export=False)
        found = sides.start(job)
        assert found.chosen == row.decided
        first = row.decided["rollout"].partition(" ")[0].strip(",")
        assert str(sides.handed(found.made)) == (row.handed or sides.names[first])
        assert len(found.told) == len(row.told), found.told
        assert all(part in text for part, text in zip(row.told, found.told, strict=True))
        assert row.because in " ".join(found.notes)
        if planned is not None:
            warnings_, notes = planned
            assert warnings_ == found.told
            assert notes == found.notes, (notes, found.notes)


class NoHead:
    """A framework whose LM heads the shim does not change refuses PRECISION_SHIM_HEAD=fp32."""

    def test_an_lm_head_in_fp32_in_the_rollout_alone_is_said(
        self, shim: Any, sides: Sides, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shim(frameworks=sides.framework, strict=True, export=False)
        assert "LM head" not in sides.start(sides.job("bf16", "bf16")).chosen
        found = sides.start(sides.served_in_fp32())
        (doubted,) = [one for one in found.notes if one.startswith("LM head: ")]
        assert ", so whether " in doubted  # no engine is installed here
        precision_shim.uninstall()
        plant(tmp_path / "engines", monkeypatch)
        shim(frameworks=sides.framework, strict=True, export=False)
        found = sides.start(sides.served_in_fp32())
        assert found.chosen["LM head"] == f"fp32 in rollout, the model's dtype in {sides.model}"
        (said,) = [one for one in found.notes if one.startswith("LM head: ")]
        assert re.search(r"\((\w+\.)+(head_dtype|enable_fp32_lm_head); \w+: the shim does", said)

    def test_an_lm_head_in_fp32_is_refused(
        self, shim: Any, monkeypatch: pytest.MonkeyPatch, sides: Sides
    ) -> None:
        monkeypatch.setenv("PRECISION_SHIM_HEAD", "fp32")
        shim(frameworks=sides.framework, export=False)
        job = sides.job("bf16", "bf16")
        (told,) = sides.start(job).told
        refused = rf"{sides.framework} \d\S+: PRECISION_SHIM_HEAD=fp32 is refused.*"
        assert re.fullmatch(rf"{refused}The shim changes no LM head. Unset .+HEAD\.", told)
        precision_shim.uninstall()
        if type(sides).line is not Sides.line:
            assert of_plan(sides.line(job), "lm-head")[0] == [told]
        shim(frameworks=sides.framework, strict=True, export=False)
        with pytest.raises(UnsupportedPrecisionError, match="does not change the LM heads"):
            sides.run(job)
