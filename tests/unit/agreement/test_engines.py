"""What the installed rollout engine makes of a dtype, and what it refuses, read from its source."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from precision_shim.precision.agreement import AUTO, Engine
from precision_shim_adapters.agreement import engines
from precision_shim_adapters.agreement.model_files import resolve_by_model

from ...stand_ins.planted_engines import plant_choices


@pytest.fixture(autouse=True)
def forget() -> None:
    engines._taken.cache_clear()


def resolved(tmp_path: Path, backend: str, dtype: str, kind: str, **more: object) -> Engine:
    config = {"dtype": dtype, "model_type": kind, **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return resolve_by_model(Engine("rollout", AUTO, "rollout.dtype"), backend, str(tmp_path))


@pytest.mark.parametrize(
    ("backend", "dtype", "kind", "computes", "refuses"),
    [
        ("vllm", "float32", "qwen2", "bf16", ""),
        ("vllm", "float16", "qwen2", "fp16", ""),
        ("vllm", "float16", "gemma2", "bf16", "vllm unknown refuses to run gemma2 in fp16: it ov"),
        ("vllm", "float16", "plamo2", "fp16", ""),
        ("sglang", "float32", "qwen2", "fp16", ""),
        ("sglang", "float32", "gemma", "bf16", ""),
        ("sglang", "bfloat16", "gemma2", "bf16", ""),
    ],
)
def test_the_engines_own_function_decides(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    dtype: str,
    kind: str,
    computes: str,
    refuses: str,
) -> None:
    plant_choices(tmp_path / "engines", monkeypatch)
    found = resolved(tmp_path, backend, dtype, kind)
    assert found.computes == computes
    assert found.refuses.startswith(refuses)
    assert bool(found.refuses) is bool(refuses)
    assert found.because.startswith("rollout.dtype=auto, and the checkpoint is in ")
    changes = dtype == "float32" or (kind == "gemma2" and dtype == "float16")
    assert (f"of which {backend} unknown makes {computes}" in found.because) is changes
    assert not [name for name in sys.modules if name.startswith(("vllm.", "sglang."))]


def test_sglang_asks_the_language_model_of_a_multimodal_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_choices(tmp_path / "engines", monkeypatch)
    text = {"model_type": "gemma"}
    assert resolved(tmp_path, "sglang", "float32", "pali", text_config=text).computes == "bf16"


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
@pytest.mark.parametrize("source", [None, "", "def _get_and_verify_dtype(config): broken"])
def test_what_is_not_read_is_not_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, source: str | None
) -> None:
    reason = f"{backend} is not installed in this environment"
    if source is not None:
        plant_choices(tmp_path / "engines", monkeypatch, vllm=source, sglang=source)
        reason = f"the source of {backend} unknown does not tell"
    found = resolved(tmp_path, backend, "float32", "gemma2")
    assert (found.computes, found.refuses) == (AUTO, "")
    assert found.because.endswith(f"what {backend} makes of that is not known here: {reason}")
    half = resolved(tmp_path, backend, "float16", "qwen2")  # the meaning of the word "auto"
    assert half.computes == "fp16"
