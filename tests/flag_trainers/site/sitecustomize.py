"""Lets each process of a slime or miles job run on a CPU and without what rollouts need.

A module of Megatron-LM's checkout, which megatron-core's wheel lacks, has a stand-in, too;
``tests/flag_trainers/cpu.py`` has the stand-ins of the actor, and ``torch_memory_saver``, which
both actors import, is beside this file.
"""

import importlib
import sys
import types

from precision_shim.process.finders import Watcher

TRAINERS = ("slime", "miles")
ABSENT = (
    *("aiohttp", "fastapi", "mooncake", "pybase64", "pylatexenc"),
    *("setproctitle", "sglang", "sglang_router", "starlette", "uvicorn"),
)
TOKENIZER = "megatron.training.tokenizer"


def _prepare(name: str) -> None:
    if name not in TRAINERS:
        importlib.import_module("tests.flag_trainers.cpu").stay_on_cpu(name.partition(".")[0])
        return
    # Not earlier, because Ray's agents look for aiohttp.
    sys.meta_path.append(importlib.import_module("tests.stand_ins.empty_packages").Empty(*ABSENT))
    found = types.ModuleType(f"{TOKENIZER}.tokenizer")
    found._vocab_size_with_padding = lambda size, args: size
    sys.modules |= {TOKENIZER: types.ModuleType(TOKENIZER), found.__name__: found}


Watcher(_prepare, before=True).watch([*TRAINERS, *(f"{one}.ray.train_actor" for one in TRAINERS)])
