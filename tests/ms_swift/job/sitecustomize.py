"""Python imports this module at its start, after start-up files such as the shim's.

The folder of this module is on a job's PYTHONPATH. In the processes of ms-swift that use Megatron,
the module puts the stand-ins for a GPU in place, before ms-swift's own code runs.
"""

import os
import sys

_ENTRIES = ("/_megatron/sft.py", "/_megatron/rlhf.py")

if "RAY_SWIFT_GROUP" in os.environ or any(word.endswith(_ENTRIES) for word in sys.orig_argv[1:3]):
    from tests.ms_swift import cpu

    cpu.enter()
