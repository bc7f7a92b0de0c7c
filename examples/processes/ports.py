"""Chooses ports for a process that starts later.

Linux assigns ports from ``ip_local_port_range`` to processes that bind port 0 or open a connection.
Linux may therefore assign a port from this range before the later process has started.
"""

from __future__ import annotations

import random

__all__ = ["a_range"]

_FIRST, _END = 20_000, 32_000
"""Limits above the ports of Ray's workers (10002 to 19999), and below Linux's (from 32768)."""


def a_range() -> list[int]:
    """Return the first port to try, and the port after the last port to try.

    The first port is random, so that two jobs at the same time seldom try the same ports.
    """
    return [random.randrange(_FIRST, _END - 1000), _END]
