"""Ports for a process that starts later.

Who binds port 0, or opens a connection, gets a port of ``ip_local_port_range``. A port of these
that was free a moment ago may be taken by the time that its process has started.
"""

from __future__ import annotations

import random

__all__ = ["a_range"]

_FIRST, _END = 20_000, 32_000
"""Above the ports of Ray's workers (10002 to 19999), below those that Linux gives (32768)."""


def a_range() -> list[int]:
    """A first port and the one after the last, to look for a free one in that order.

    The first is drawn, so that two jobs at once seldom look at the same.
    """
    return [random.randrange(_FIRST, _END - 1000), _END]
