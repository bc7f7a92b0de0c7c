"""The shim within a process: start-up, ``install()``, settings, and Ray's workers.

``startup`` waits for a framework's import, ``session`` implements ``install()``, ``settings`` reads
the variables and ``registry`` lists the adapters. ``in_force`` decides whether a feature is in
force, and ``foreseen`` predicts the decision from source. ``carriers`` passes the variables to
Ray's processes, ``finders`` reports imports, and ``forks`` renews locks in a forked child.
"""
