"""The few vLLM names that SkyRL imports for an engine's arguments and a weight's description.

vLLM has no wheel for a CPU. The stand-ins are a parser without arguments, records, and functions
that gather a weight. SkyRL's own code then runs.
"""

from __future__ import annotations

import argparse
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch


class ParamMeta(NamedTuple):
    """The description of a weight that a source sends before the weight."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    """The empty base class of SkyRL's sources, which define all of its methods themselves."""


def materialize_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a weight, as vLLM's function does."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


class _NoArguments:
    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        return parser


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Define the vLLM names for SkyRL until the test ends."""
    # Import this module before the stand-ins exist, because with vLLM it imports more names.
    import skyrl.backends.skyrl_train.inference_servers.utils  # noqa: F401

    contents: dict[str, dict[str, Any]] = {
        "vllm": {"AsyncEngineArgs": _NoArguments},
        "vllm.config": {"WeightTransferConfig": lambda **fields: fields},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "ParamMeta": ParamMeta,
            "WeightSource": WeightSource,
            "materialize_full_tensor": materialize_full_tensor,
        },
        "vllm.entrypoints": {},
        "vllm.entrypoints.launchers": {},
        "vllm.entrypoints.launchers.cli_args": {"FrontendArgs": _NoArguments},
        "vllm.entrypoints.openai": {},
        "vllm.entrypoints.openai.cli_args": {"FrontendArgs": _NoArguments},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(device_type="cuda")},
        "vllm.utils": {},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    # SkyRL imports stand-ins into the module sources, so the test's end also removes sources.
    monkeypatch.delitem(
        sys.modules, "skyrl.backends.skyrl_train.weight_sync.sources", raising=False
    )


def engine_dtype(config: Any) -> str:
    """The dtype in the arguments that SkyRL starts its engines with."""
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args

    return str(build_vllm_cli_args(config).dtype)
