"""Replaces launch lines in a JSON file by the configs that verl's own ``main_ppo`` makes of them.

It is a process of its own, because Hydra configures a process's logging and streams. Each line is a
list of words. It is replaced by a text if verl refuses it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from precision_shim_adapters.common.omegaconf_values import plain

from ..processes.composed_once import composed_once


def composed(program: Any, words: list[str]) -> dict[str, Any] | str:
    """The config that verl's ``main`` receives, or why it receives none."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    configs: list[dict[str, Any]] = []
    # The function that starts Ray: everything before it runs.
    program.run_ppo = lambda config, **_: configs.append(plain(config))
    sys.argv = [str(program.__file__), *words]
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()) as told,
        ):
            program.main()
    except SystemExit:
        return told.getvalue()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    return configs[0] if len(configs) == 1 else f"{len(configs)} jobs"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    lines = json.loads(file.read_text(encoding="utf-8"))
    main_ppo = importlib.import_module("verl.trainer.main_ppo")
    with composed_once():  # of which hydra.main takes the merged files
        configs = [composed(main_ppo, words) for words in lines]
    file.write_text(json.dumps(configs), encoding="utf-8")
