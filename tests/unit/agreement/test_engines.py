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
    engines._bound.cache_clear()


def resolved(tmp_path: Path, backend: str, dtype: str | None, kind: str, **more: object) -> Engine:
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
    assert found.because.startswith("rollout.dtype=auto, and config.json says ")
    changes = dtype == "float32" or (kind == "gemma2" and dtype == "float16")
    assert (f"of which {backend} unknown makes {computes}" in found.because) is changes
    assert not [name for name in sys.modules if name.startswith(("vllm.", "sglang."))]


@pytest.mark.parametrize(
    ("backend", "top", "text", "stored", "computes", "says"),
    [
        ("vllm", "bfloat16", "float32", "", "bf16", "bf16, fp32 in text_config"),
        ("sglang", "bfloat16", "float32", "", "fp16", "bf16, fp32 in text_config"),
        ("sglang", "float32", "bfloat16", "", "bf16", "fp32, bf16 in text_config"),
        ("vllm", None, "float16", "", "fp16", "fp16 in text_config"),
        ("vllm", "float32", None, "F16", "bf16", "fp32"),
        ("vllm", None, None, "F16", "fp16", "no dtype, beside files in fp16"),
        ("sglang", None, None, "BF16", "fp16", "no dtype, beside files in bf16"),
        ("vllm", None, None, "", "bf16", "no dtype, beside files in no known dtype"),
    ],
)
def test_where_the_engine_reads_the_dtype(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    top: str | None,
    text: str | None,
    stored: str,
    computes: str,
    says: str,
) -> None:
    plant_choices(tmp_path / "engines", monkeypatch)
    if stored:
        header = json.dumps({"x": {"dtype": stored, "shape": [1], "data_offsets": [0, 2]}}).encode()
        data = len(header).to_bytes(8, "little") + header + b"00"
        (tmp_path / "model.safetensors").write_bytes(data)
    parts = {} if text is None else {"text_config": {"torch_dtype": text}}
    found = resolved(tmp_path, backend, top, "qwen2", **parts)
    assert found.computes == computes
    assert (
        found.because.partition(", of which")[0]
        == f"rollout.dtype=auto, and config.json says {says}"
    )


def test_two_dtypes_are_not_known_without_the_engine(tmp_path: Path) -> None:
    found = resolved(tmp_path, "vllm", "bfloat16", "qwen2", text_config={"dtype": "float16"})
    assert found.computes == AUTO
    assert resolved(tmp_path, "vllm", None, "qwen2").computes == AUTO


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
