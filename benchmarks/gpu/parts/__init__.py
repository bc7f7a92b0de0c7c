"""What is measured: one module per part, each with ``run(bench)``."""
