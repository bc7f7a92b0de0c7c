# zz_precision_shim.pth executes this file in every process whose PRECISION_SHIM is set and not off.
# If no bytecode is cached, the .pth file calls exec() on this file's text instead of importing it.
# The first import in a Python process costs 1.5 ms. Compiling this file costs 13,000 processor
# instructions for each word of code, and none for a comment.
import os
import sys


# A finder that waits for the import of a package in ``names``, and finds no module itself.
class PrecisionShimStart:
    finds_nothing = True

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            try:
                from precision_shim.process.startup import take_over
            except ImportError:  # a tool such as pex has replaced sys.path: go on without the shim
                return
            self.names = ()
            return take_over(name, target)


# In a virtual environment Python executes this file twice. The second execution does nothing, even
# if the shim was removed after the first execution.
if "precision_shim.process.standby" not in sys.modules and not any(
    hasattr(finder, "finds_nothing") for finder in sys.meta_path
):
    named = os.environ.get("PRECISION_SHIM_FRAMEWORKS", "").lower().replace("-", "_")
    names = {
        "torch",
        "ray",
        "verl",
        "skyrl",
        "nemo_rl",
        "torchtitan",
        "areal",
        "swift",
        "roll",
        "slime",
        "miles",
    }
    PrecisionShimStart.names = names.union(named.replace(",", " ").split())
    sys.meta_path.insert(0, PrecisionShimStart())
