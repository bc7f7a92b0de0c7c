"""Stores the results of a run in one file, which is complete JSON at every moment."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .plan import EVERYTHING_HELD, SOMETHING_FAILED, SOMETHING_NOT_RUN, Part

FILE_NAME = "proof.json"
FORMAT = 1


class Store:
    """The file ``proof.json`` of a run.

    A part's ``state`` is ``"waiting"``, ``"running"``, ``"ran"``, ``"failed"``, ``"cut short"``
    (the run ended while the part ran) or ``"not run"``. A part in one of the last three states has
    a ``reason``. A check's ``holds`` is true, false, or null with the reason in ``why``.
    """

    def __init__(self, folder: Path, parts: Iterable[Part], **about: Any) -> None:
        self.path = folder / FILE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        self.values: dict[str, Any] = {
            "format": FORMAT,
            **about,
            "began": now(),
            "ended": None,
            "machine": {},
            "parts": {
                part.name: {
                    "number": part.number,
                    "title": part.title,
                    "state": "waiting",
                    "reason": "",
                    "seconds": None,
                    "results": [],
                    "checks": [],
                }
                for part in parts
            },
        }
        self.write()

    def part(self, name: str) -> dict[str, Any]:
        """The record of a part."""
        found: dict[str, Any] = self.values["parts"][name]
        return found

    def take(self, message: dict[str, Any]) -> None:
        """Store a worker's message, and write the file."""
        kind = message.pop("kind")
        if kind == "machine":
            self.values["machine"].update(message)
        else:
            part = self.part(message.pop("part"))
            if kind == "state":
                part.update(message)
            else:
                part[{"result": "results", "check": "checks"}[kind]].append(message)
        self.write()

    def close(self) -> None:
        """Note the end."""
        self.values["ended"] = now()
        self.write()

    def write(self) -> None:
        """Replace the file by a complete new file; a killed run leaves the old file intact."""
        beside = self.path.with_suffix(".json.new")
        with beside.open("w", encoding="utf-8") as file:
            json.dump(self.values, file, indent=1, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)


def exit_status(values: dict[str, Any]) -> int:
    """The exit status of a run."""
    parts = values["parts"].values()
    checks = [check for part in parts for check in part["checks"]]
    if any(part["state"] == "failed" for part in parts) or any(c["holds"] is False for c in checks):
        return SOMETHING_FAILED
    if any(part["state"] != "ran" for part in parts):
        return SOMETHING_NOT_RUN
    return EVERYTHING_HELD


def now() -> str:
    """The time, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
