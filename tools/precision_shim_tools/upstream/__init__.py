"""Find the changes in a framework's release, by reading its source.

``trees`` finds a release in a wheel or a folder. ``record`` adds a release to the record of the
symbols that seams rely on, and ``changes`` shows how their code changed. ``framework_status``
predicts the shim's effect on a release.
"""
