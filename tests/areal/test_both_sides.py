"""The dtypes of AReaL's trainer and rollout: the driver's report, the engine's arguments.

The configs go through AReaL's own command line and merge, up to the command that starts SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precision_shim
from precision_shim.errors import DtypeError, UnsupportedPrecisionError

from ..every_framework.shim_warnings import watched
from .test_pages import YAML

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
PAIRS = [("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp16")]
FOLLOW = {"rollout": "follow"}
LOST = ("fp16", "bf16")


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Any]:
    """Merges a config as AReaL's launchers and scripts do; the YAML sets no rollout dtype."""
    (tmp_path / "job.yaml").write_text("\n".join(YAML.replace("sglang: {", "#").splitlines()))

    def merged(*words: str) -> Any:
        from areal.api.cli_args import GRPOConfig, parse_cli_args, to_structured_cfg
        from omegaconf import OmegaConf

        written, _ = parse_cli_args(["--config", str(tmp_path / "job.yaml"), *words])
        return OmegaConf.to_object(to_structured_cfg(written, config_cls=GRPOConfig))

    return merged


def arguments(config: Any, backend: str = "sglang") -> str:
    """The dtype in the command that starts the rollout's server."""
    from areal.api import cli_args

    if backend == "vllm":
        kind, more = cli_args.vLLMConfig, {"vllm_config": config.vllm, "pp_size": 1}
    else:
        kind, more = cli_args.SGLangConfig, {"sglang_config": config.sglang, "base_gpu_id": 0}
    with pytest.MonkeyPatch.context() as patch:  # AReaL asks for SGLang's version
        patch.setattr(cli_args.pkg_version, "is_version_greater_or_equal", lambda *_: True)
        return str(kind.build_args(tp_size=1, **more)["dtype"])


def decided(subject: str = "rollout") -> list[str]:
    return [
        one.chosen
        for one in precision_shim.status().decisions
        if (one.framework, one.subject, one.feature) == ("areal", subject, "rollout-agreement")
    ]


def both(trainer: str, rollout: str, backend: str = "sglang") -> list[str]:
    words = [f"actor.dtype={DTYPES[trainer]}", f"++{backend}.dtype={rollout}"]
    return [*words, f"rollout.backend={backend}:d4p1t1"]


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
@pytest.mark.parametrize(("trainer", "rollout"), PAIRS)
def test_the_driver_tells(
    shim: Any, job: Callable[..., Any], trainer: str, rollout: str, backend: str
) -> None:
    shim(frameworks="areal")
    config, told = watched(lambda: job(*both(trainer, rollout, backend)))
    same = trainer == rollout
    text = f"{rollout}, as the actor" if same else f"{rollout} beside the actor's {trainer}"
    assert decided() == [text]
    assert len(told) == ((trainer, rollout) == LOST)
    for text in told:
        assert text.startswith("areal 1.0.4: the actor computes in fp16 (actor.dtype), the rollout")
        assert f"Write {backend}.dtype=float16, or set PRECISION_SHIM_ROLLOUT=follow" in text
    assert arguments(config, backend) == DTYPES[rollout]
    assert watched(lambda: job(*both(trainer, rollout, backend)))[1] == []  # said once
    assert len(decided()) == 1  # AReaL merges the config in several places


def test_strict(shim: Any, job: Callable[..., Any]) -> None:
    shim(frameworks="areal", strict=True)
    with pytest.raises(UnsupportedPrecisionError, match=r"Write sglang\.dtype=float16"):
        job(*both("fp16", "bf16"))
    job(*both("fp16", "fp16"))


REF = "+ref={backend: 'megatron:d4', experiment_name: a, trial_name: b, dtype: bfloat16}"


@pytest.mark.parametrize("written", ["", "bfloat16", "auto"])
def test_follow_replaces_what_stands_there(
    shim: Any, job: Callable[..., Any], written: str
) -> None:
    shim(frameworks="areal", settings=FOLLOW, strict=True)
    words = [f"++sglang.dtype={written}"] * bool(written)
    words += ["actor.dtype=float16", REF, "++actor.kl_ctl=0.1"]
    config = job(*words)
    assert (arguments(config), config.ref.dtype) == ("float16", "float16")
    assert decided() == decided("ref") == ["fp16, as the actor"]
    (keys,) = decided("dtype keys")
    before = written or "bfloat16"
    assert keys == f"ref.dtype: bfloat16 -> float16; sglang.dtype: {before} -> float16"
    job(*words)  # AReaL merges the config in several places
    assert decided("dtype keys") == [keys]


def test_adam_bf16_computes_in_bf16(shim: Any, job: Callable[..., Any]) -> None:
    """As AReaL's Megatron engine does, which ``test_engine.py`` shows."""
    shim(frameworks="areal", settings=FOLLOW)
    words = ("actor.dtype=float16", "actor.optimizer.type=adam_bf16")
    assert arguments(job(*words)) == "bfloat16"
    assert decided() == ["bf16, as the actor"]
    assert arguments(job(*words, "++sglang.dtype=float16")) == "bfloat16"
    assert decided("dtype keys") == ["sglang.dtype: float16 -> bfloat16"]
    assert arguments(job(words[0], words[1], "actor.backend=fsdp:d4p1t1")) == "float16"


def test_the_servers_of_the_spmd_launchers(
    shim: Any, job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's process merges only its own section, as ``launch_sglang_server`` does."""
    shim(frameworks="areal", settings=FOLLOW)
    from areal.api.cli_args import SGLangConfig, parse_cli_args, to_structured_cfg

    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    config, (told,) = watched(lambda: job("actor.dtype=float16"))
    assert told.endswith("Write sglang.dtype=float16.")
    assert arguments(config) == "bfloat16"
    words = ["--config", str(tmp_path / "job.yaml"), "++sglang.dtype=FP16"]
    written, _ = parse_cli_args(words)
    assert to_structured_cfg(written.sglang, config_cls=SGLangConfig).dtype == "float16"
    written.sglang.dtype = "bf17"
    with pytest.raises(DtypeError, match=r"sglang\.dtype='bf17'"):
        to_structured_cfg(written.sglang, config_cls=SGLangConfig)


def test_the_reference_model(shim: Any, job: Callable[..., Any]) -> None:
    shim(frameworks="areal")
    words = [*both("fp16", "fp16"), REF]
    _, (told,) = watched(lambda: job(*words, "++actor.kl_ctl=0.1"))
    assert "the ref in bf16 (ref.dtype" in told
    assert watched(lambda: job(*words, "++actor.kl_ctl=0.0"))[1] == []  # AReaL makes no reference


def test_names(shim: Any, job: Callable[..., Any]) -> None:
    shim(frameworks="areal", strict=True)
    assert arguments(job("actor.dtype=float16", "++sglang.dtype=Half")) == "float16"
    with pytest.raises(DtypeError, match=r"areal 1\.0\.4: sglang\.dtype='bf17' is no dtype"):
        job("++sglang.dtype=bf17")
    assert arguments(job("++sglang.dtype=auto")) == "auto"


def test_an_lm_head_in_fp32_is_refused(shim: Any, job: Callable[..., Any]) -> None:
    shim(frameworks="areal", settings={"head": "fp32"})
    _, (told,) = watched(job)
    assert told.startswith("areal 1.0.4: PRECISION_SHIM_HEAD=fp32 is refused")
    assert told.endswith("The shim changes no LM head. Unset PRECISION_SHIM_HEAD.")


def test_off_nothing_is_said(shim: Any, job: Callable[..., Any]) -> None:
    shim(frameworks="areal", features="-rollout-agreement", settings=FOLLOW)
    config, told = watched(lambda: job("actor.dtype=float16"))
    assert (arguments(config), told, decided()) == ("bfloat16", [], [])


@pytest.mark.parametrize("kind", ["SFTConfig", "DPOConfig"])
def test_a_job_without_a_rollout(shim: Any, tmp_path: Path, kind: str) -> None:
    from areal.api import cli_args

    shim(frameworks="areal", strict=True)
    (tmp_path / "job.yaml").write_text(YAML)
    words = ["--config", str(tmp_path / "job.yaml"), "~rollout", "~sglang", "~vllm"]
    written, _ = cli_args.parse_cli_args([*words, "actor.dtype=float16"])
    cli_args.to_structured_cfg(written, config_cls=getattr(cli_args, kind))
    assert decided() == []
