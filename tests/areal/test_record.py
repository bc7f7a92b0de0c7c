"""Recorded symbols and versions, compared with the installed version."""

from __future__ import annotations

from ..every_framework.contract import Recorded


class TestRecorded(Recorded):
    pass
