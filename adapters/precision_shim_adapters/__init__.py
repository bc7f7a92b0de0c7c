"""The adapters, one module or small package per framework, and code that several adapters share.

``frameworks`` declares each framework. An adapter lists seams, translates between its framework's
configs and the shim's data classes, and contains no rules on precision.
"""
