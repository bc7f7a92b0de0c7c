"""Ports for a process that starts later.

A process that binds port 0, or opens a connection, gets a port from ``ip_local_port_range``. If a
port from that range is chosen for a process, it may be taken before the process has started.
"""

from __future__ import annotations

import random

__all__ = ["a_range"]

_FIRST, _END = 20_000, 32_000
"""Above the ports of Ray's workers (10002 to 19999), below those that Linux assigns (32768)."""


def a_range() -> list[int]:
    """The first port to try for a free one, and the port after the last to try.

    The first is drawn at random, so that two jobs at the same time seldom try the same ports.
    """
    return [random.randrange(_FIRST, _END - 1000), _END]
