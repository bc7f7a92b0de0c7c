"""The dtypes of AReaL's trainer and rollout: the driver's report, the engine's arguments.

The configs go through AReaL's own command line and merge, up to the command that starts SGLang.
"""

from __future__ import annotations

from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from precision_shim.errors import DtypeError

from ..every_framework.both_sides import (
    DTYPES,
    FOLLOW,
    BothSides,
    Names,
    NoHead,
    Routers,
    Row,
    Rows,
    Sides,
    each,
)
from .test_pages import YAML


class Areal(Sides):
    """Merges a config as AReaL's launchers and scripts do; the YAML sets no rollout dtype."""

    framework = "areal"

    def __init__(self, folder: Path, backend: str = "sglang") -> None:
        self.file, self.backend, self.key = folder / "job.yaml", backend, f"{backend}.dtype"
        self.config: Any = None
        self.file.write_text("\n".join(YAML.replace("sglang: {", "#").splitlines()))

    def job(self, trainer: str, rollout: str, *more: str) -> list[str]:
        words = [f"actor.dtype={DTYPES[trainer]}", f"rollout.backend={self.backend}:d4p1t1", *more]
        return [*words, f"++{self.key}={rollout}"] if rollout else words

    def routers(self) -> dict[str, str]:
        wide = "bf16 beside the actor's fp32"
        if self.backend == "sglang":
            wide = "fp32, as the actor (actor.archon.moe_router_dtype=fp32; sglang"
        key = "actor.megatron.moe_router_dtype is not read"
        on_archon = "actor.backend=archon:d4p1t1"
        return {
            on_archon: wide,
            f"{on_archon} ++actor.archon.moe_router_dtype=null": "the actor's bf16"
            if self.backend == "sglang"
            else "bf16, as the actor",
            "": f"beside the actor's not known here ({key}",
        }

    def routed(self, model: Path, *more: str) -> list[str]:
        return self.job("bf16", "bf16", f"actor.path={model}", *more)

    def served_in_fp32(self) -> list[str]:
        """AReaL 1.0.4's sections have no key for the LM head; a script's own sections may."""
        from areal.api.cli_args import GRPOConfig, SGLangConfig, vLLMConfig

        option: dict[str, Any] = {"hf_overrides": {"head_dtype": "float32"}}
        kind: Any = vLLMConfig
        if self.backend == "sglang":
            option, kind = {"enable_fp32_lm_head": True}, SGLangConfig
        ((name, value),) = option.items()
        made = [(name, Any, field(default_factory=lambda: value))]
        section = make_dataclass(f"My{kind.__name__}", made, bases=(kind,))
        one = (self.backend, section, field(default_factory=section))
        self.config = make_dataclass("MyConfig", [one], bases=(GRPOConfig,))
        return self.job("bf16", "bf16")

    def run(self, job: list[str]) -> Any:
        from areal.api.cli_args import GRPOConfig, parse_cli_args, to_structured_cfg
        from omegaconf import OmegaConf

        written, _ = parse_cli_args(["--config", str(self.file), *job])
        config, self.config = self.config or GRPOConfig, None
        return OmegaConf.to_object(to_structured_cfg(written, config_cls=config))

    def handed(self, made: Any) -> str:
        """The dtype in the command that starts the rollout's server."""
        from areal.api import cli_args

        if self.backend == "vllm":
            kind, more = cli_args.vLLMConfig, {"vllm_config": made.vllm, "pp_size": 1}
        else:
            kind, more = cli_args.SGLangConfig, {"sglang_config": made.sglang, "base_gpu_id": 0}
        with pytest.MonkeyPatch.context() as patch:  # AReaL asks for SGLang's version
            patch.setattr(cli_args.pkg_version, "is_version_greater_or_equal", lambda *_: True)
            return str(kind.build_args(tp_size=1, **more)["dtype"])


@pytest.fixture
def sides(tmp_path: Path) -> Areal:
    return Areal(tmp_path)


class TestBothSides(BothSides, Names, NoHead, Routers):
    @pytest.fixture(params=["sglang", "vllm"])
    def sides(self, request: pytest.FixtureRequest, tmp_path: Path) -> Areal:
        return Areal(tmp_path, request.param)


REF = "+ref={backend:'megatron:d4',experiment_name:a,trial_name:b,dtype:bfloat16}"


@pytest.mark.parametrize("written", ["", "auto"])
def test_follow_replaces_what_stands_there(shim: Any, sides: Areal, written: str) -> None:
    shim(frameworks="areal", settings=FOLLOW, strict=True)
    job = sides.job("fp16", written, REF, "++actor.kl_ctl=0.1")
    found = sides.start(job)
    assert (sides.handed(found.made), found.made.ref.dtype) == ("float16", "float16")
    before = written or "bfloat16"
    assert found.chosen == {
        **dict.fromkeys(("ref", "rollout"), "fp16, as the actor"),
        "dtype keys": f"ref.dtype: bfloat16 -> float16; sglang.dtype: {before} -> float16",
    }
    assert sides.start(job).chosen == found.chosen  # AReaL merges the config in several places


def test_the_servers_of_the_spmd_launchers(
    shim: Any, sides: Areal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's process merges only its own section, as ``launch_sglang_server`` does."""
    shim(frameworks="areal", settings=FOLLOW)
    from areal.api.cli_args import SGLangConfig, parse_cli_args, to_structured_cfg

    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    found = sides.start(sides.job("fp16", ""))
    assert found.told[0].endswith("Write sglang.dtype=float16.")
    assert sides.handed(found.made) == "bfloat16"
    written, _ = parse_cli_args(["--config", str(sides.file), "++sglang.dtype=FP16"])
    assert to_structured_cfg(written.sglang, config_cls=SGLangConfig).dtype == "float16"
    written.sglang.dtype = "bf17"
    with pytest.raises(DtypeError, match=r"sglang\.dtype='bf17'"):
        to_structured_cfg(written.sglang, config_cls=SGLangConfig)


LOW = "actor.optimizer.type=adam_bf16"
ON_FSDP, KL = "actor.backend=fsdp:d4p1t1", "++actor.kl_ctl=0.1"
AGREED, LOST = "fp16, as the actor", "bf16 beside the actor's fp16"
TOLD = ("the ref in bf16 (ref.dtype",)
FP8 = "++actor.megatron.fp8_config={mode:e4m3,recipe:blockwise,first_last_layers_bf16:true}"
BLOCKS = "weights in fp8 e4m3 (blocks of 128x128), activations{} in fp8 e4m3 (blocks of 1x128)"
ON_ARCHON = "actor.backend=archon:d4p1t1 ++actor.archon.fp8_config.mode=blockwise"


@each(
    fp8=Row(
        f"bf16 bf16 {FP8}",
        f"bf16 beside the actor's bf16 with {BLOCKS.format(' and gradients')}; not in the first 1 "
        "layers, the last 1 layers",
        because="actor.megatron.fp8_config.mode=e4m3, actor.megatron.fp8_config.recipe=blockwise",
    ),
    fp8_that_fsdp_does_not_read=Row(f"bf16 bf16 {FP8} {ON_FSDP}", "bf16, as the actor"),
    archon=Row(
        f"bf16 bf16 {ON_ARCHON} ++actor.archon.fp8_config.exclude_modules=[output]",
        f"bf16 beside the actor's bf16 with {BLOCKS.format('')}; not in output, experts",
        because="actor.archon.fp8_config.mode=blockwise",
    ),
    rollout=Row(
        "bf16 bf16 ++sglang.torchao_config=fp8wo",
        "bf16 with fp8wo weights beside the actor's bf16",
        because="the rollout has weights and activations in not known here",
    ),
    # As AReaL's Megatron engine does, which ``test_engine.py`` shows.
    adam_bf16=Row(f"fp16 - {LOW}", "bf16, as the actor", follow=""),
    adam=Row(f"fp16 fp16 {LOW}", "bf16, as the actor", follow="sglang.dtype: float16 -> bfloat16"),
    on_fsdp=Row(f"fp16 - {LOW} {ON_FSDP}", AGREED, follow="sglang.dtype: bfloat16 -> float16"),
    reference=Row(f"fp16 fp16 {REF} {KL}", {"ref": LOST, "rollout": AGREED}, TOLD),
    no_reference=Row(f"fp16 fp16 {REF} ++actor.kl_ctl=0.0", AGREED),
    auto=Row("bf16 auto", "the checkpoint's dtype beside the actor's bf16", handed="auto"),
)
class TestRows(Rows):
    pass


@pytest.mark.parametrize("kind", ["SFTConfig", "DPOConfig"])
def test_a_job_without_a_rollout(shim: Any, sides: Areal, kind: str) -> None:
    from areal.api import cli_args

    shim(frameworks="areal", strict=True)
    sides.file.write_text(YAML)
    words = ["--config", str(sides.file), "~rollout", "~sglang", "~vllm", "actor.dtype=float16"]
    written, _ = cli_args.parse_cli_args(words)
    made = getattr(cli_args, kind)
    sides.run = lambda job: cli_args.to_structured_cfg(written, config_cls=made)  # type: ignore[method-assign]
    assert sides.start(words).chosen == {}
