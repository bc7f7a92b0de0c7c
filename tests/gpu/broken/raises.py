"""A part of a proof that records a result and then raises an error."""


def run(bench):
    bench.record("a thing", "measured", number=1)
    raise RuntimeError("no such kernel")
