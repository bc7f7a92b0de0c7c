"""A part that never ends."""

import time


def run(bench):
    bench.record("a thing", "measured", number=1)
    time.sleep(3600)
