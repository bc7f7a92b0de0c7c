"""The parts of the proof: one module for each, with a function ``run(bench)``."""
