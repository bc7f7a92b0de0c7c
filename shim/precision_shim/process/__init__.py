"""The shim within a process: start-up, ``install()``, settings, and passing them to Ray's workers.

``startup`` waits for a framework's import, ``session`` holds what ``install()`` turns on,
``settings`` reads the variables and ``registry`` lists the adapters. ``in_force`` decides whether a
feature is in force, and ``foreseen`` predicts that from source. ``carriers`` passes the variables
to Ray's processes, ``finders`` reports imports, ``forks`` renews locks in a forked child.
"""
