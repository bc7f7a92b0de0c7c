"""NeMo-RL's own classes start the real SGLang, and its driver asks the server for its dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from precision_shim.auditing import halves
from precision_shim.auditing.halves import ROLLOUT, Held

from ..rank_server import rank_server
from ..ray_cluster import drive
from .weights import make_llama, share_of


@pytest.mark.usefixtures("start_up_file")
@pytest.mark.timeout(700)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_server_of_nemo_rls_own_worker_is_asked(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, dtype: str
) -> None:
    llama, audits = make_llama(tmp_path / "llama"), tmp_path / "audits"
    with rank_server("tests.verl.ray_processes", tmp_path_factory.mktemp("driver")) as drivers:
        done = drive(
            drivers,
            Path(__file__).with_name("nemo_rl_driver.py"),
            llama,
            dtype,
            timeout=600,
            CUDA_VISIBLE_DEVICES="0",  # Ray refuses its GPU, which is only a number, beside none
            PRECISION_SHIM="1",
            PRECISION_SHIM_AUDIT_DIR=str(audits),
        )
    assert done["tokens"] == 4
    assert set(done["seams"].values()) == {"wrapped"}
    assert [one["sync"] for one in done["held"]] == [0, 1, 2]
    for found in map(Held.of, done["held"]):
        assert (found.framework, found.subject) == ("nemo-rl", ROLLOUT)
        assert (found.name, found.model) == (done["url"].removeprefix("http://"), str(llama))
        computes = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
        assert (found.engine, found.computes) == ("sglang 0.5.12", computes)
        assert found.not_answered == ""
        assert found.weights is not None
        wanted = share_of(llama, getattr(torch, dtype))
        assert (found.weights.exact, found.weights.sampled) == wanted
    # Nobody but the driver has written a record.
    assert len(list(halves.read(audits))) == 1
