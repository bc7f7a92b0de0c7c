"""The shim in a process: start-up, ``install()``, settings, and the way into other processes.

``startup`` waits for a framework's import, ``session`` is what ``install()`` turns on, ``settings``
has the variables and ``registry`` the adapters. ``in_force`` tells whether a feature acts and
``foreseen`` whether it would. ``carriers`` brings the variables to Ray's processes, ``finders``
tells when a module was imported, ``forks`` renews locks in a forked child.
"""
