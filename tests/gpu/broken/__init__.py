"""Parts that fail, each in its own way, for tests of the proof on a GPU (``benchmarks.gpu``)."""
