"""The shim in a process: start-up, ``install()``, settings, and the way into other processes.

``startup`` waits for a framework's import, ``session`` holds what ``install()`` turns on,
``settings`` reads the variables and ``registry`` lists the adapters. ``in_force`` tells whether a
feature is in force, and ``foreseen`` whether it would be. ``carriers`` brings the variables to
Ray's processes, ``finders`` reports imports, ``forks`` renews locks in a forked child.
"""
