"""A part that ends in an error, with a result before it."""


def run(bench):
    bench.record("a thing", "measured", number=1)
    raise RuntimeError("no such kernel")
