"""Formats the table that a run prints at its end."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

WIDTH = 100
_VERDICTS = {True: "holds", False: "DOES NOT HOLD", None: "not judged"}


def table(values: dict[str, Any]) -> str:
    """All parts with their results and checks, as text."""
    lines = [headline(values), ""]
    for name, part in values["parts"].items():
        spent = "" if part["seconds"] is None else f", {part['seconds']:.1f} s"
        lines.append(f"{part['number']}  {part['title']} ({name}): {part['state']}{spent}")
        lines += [f"   {line}" for line in _body(part)]
    lines += ["", verdict(values)]
    return "\n".join(lines)


def headline(values: dict[str, Any]) -> str:
    """The device and the versions, as text."""
    machine = values["machine"]
    where = machine.get("device", "no part has come to a device")
    versions = ", ".join(
        f"{name} {machine[key]}"
        for name, key in (
            ("torch", "torch"),
            ("megatron-core", "megatron_core"),
            ("TransformerEngine", "transformer_engine"),
            ("precision_shim", "precision_shim"),
        )
        if key in machine
    )
    what = "DRY RUN, its figures prove nothing about a GPU: " if values["dry_run"] else ""
    return f"{what}{where}; {versions}" if versions else f"{what}{where}"


def verdict(values: dict[str, Any]) -> str:
    """Numbers of parts that ran and of checks that hold, as text."""
    parts = values["parts"].values()
    ran = sum(part["state"] == "ran" for part in parts)
    checks = [check["holds"] for part in parts for check in part["checks"]]
    return (
        f"{ran} of {len(parts)} parts ran; of {len(checks)} checks {checks.count(True)} hold, "
        f"{checks.count(False)} do not, {checks.count(None)} were not judged"
    )


def _body(part: dict[str, Any]) -> Iterator[str]:
    if part["reason"]:
        yield from textwrap.wrap(part["reason"], WIDTH)
    for result in part["results"]:
        yield from _entry(f"{result['what']}: {result['shows']}")
    for check in part["checks"]:
        why = f" ({check['why']})" if check["why"] else ""
        yield from _entry(f"[{_VERDICTS[check['holds']]}] {check['says']}{why}")


def _entry(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ")
