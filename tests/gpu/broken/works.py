"""A part that works."""


def run(bench):
    bench.record("a thing", "measured", number=1)
    bench.check("it holds", True)
