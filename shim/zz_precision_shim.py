# What every process executes whose environment asks for the shim; zz_precision_shim.pth sees to it.
# Without bytecode it is executed as text, since there the first import costs 1.5 ms whatever is in
# it. A word of code costs 13,000 instructions then, and a comment none.
import os
import sys


# A finder that waits for an import of one of the names, and finds nothing itself.
class PrecisionShimStart:
    finds_nothing = True

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            try:
                from precision_shim.process.startup import take_over
            except ImportError:  # a tool has replaced sys.path, as pex does: go on without
                return
            self.names = ()
            return take_over(name, target)


# In a virtual environment start-up files are executed twice. The second time does nothing, also
# where the shim was taken out in between.
if "precision_shim.process.startup" not in sys.modules and not any(
    hasattr(one, "finds_nothing") for one in sys.meta_path
):
    named = os.environ.get("PRECISION_SHIM_FRAMEWORKS", "").lower().replace("-", "_")
    names = {"torch", "ray", "verl", "skyrl", "nemo_rl", "torchtitan"}
    PrecisionShimStart.names = names.union(named.replace(",", " ").split())
    sys.meta_path.insert(0, PrecisionShimStart())
