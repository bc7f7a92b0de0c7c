"""Predict the shim's effect on a framework's release, by reading its source.

``trees`` finds a release in a wheel or a folder, and ``framework_status`` predicts.
"""
