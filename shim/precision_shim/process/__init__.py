"""The shim within a process: start-up, ``install()``, settings, and Ray's workers.

``startup`` installs the shim when a framework is imported, ``session`` implements ``install()``,
``settings`` reads the shim's environment variables, and ``registry`` lists the adapters.
``in_force`` decides whether a feature is in force, and ``foreseen`` predicts the decision from
source code. ``carriers`` passes the shim's environment variables to Ray's processes, ``finders``
reports imports, and ``forks`` gives a forked child new locks.
"""
