#!/bin/sh
# CPython 3.10 to 3.14: a finder that takes itself off sys.meta_path hides the next finder once.
# The import system walks the list itself, not a copy. A finder that waits for one module and removes
# itself when it is asked makes the finder behind it miss that import.
set -eu
python3 - << 'END'
import importlib.util
import sys

asked = []


class Once:
    def find_spec(self, name, path=None, target=None):
        asked.append("once")
        sys.meta_path.remove(self)


class Always:
    def find_spec(self, name, path=None, target=None):
        asked.append("always")


sys.meta_path[:0] = [Once(), Always()]
importlib.util.find_spec("a_module_that_nobody_has")
print(sys.version.split()[0], "asked:", asked)
assert asked == ["once"]
importlib.util.find_spec("a_module_that_nobody_has")
assert asked == ["once", "always"]
END
