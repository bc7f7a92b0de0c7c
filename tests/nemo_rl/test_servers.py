"""NeMo-RL's driver asks its workers' SGLang servers for the dtypes of the weights.

A stand-in server answers with the fields of SGLang 0.5.12's endpoints, because SGLang is not
installed; ``tests/sglang/test_nemo_rl.py`` asks the real server. ``SGLangGeneration`` is NeMo-RL's
own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from precision_shim.auditing import halves
from precision_shim_adapters.nemo_rl.servers import why_not_asked
from precision_shim_adapters.rollout.held_sglang import NAMES, ROWS

from .cpu import nemo_rl_on_cpu

MODULE = "nemo_rl.models.generation.sglang.sglang_generation"
STATE = {
    "model_path": "a model",
    "dtype": "float16",
    "quantization": None,
    "kv_cache_dtype": "auto",
    "enable_fp32_lm_head": False,
    "enable_lora": None,
    "pp_size": 1,
}


def has_sglang() -> bool:
    return importlib.util.find_spec("nemo_rl.models.generation.sglang") is not None


class Server(ThreadingHTTPServer):
    """Answers as SGLang's server does, and records each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[Any] = []
        self.state: dict[str, Any] = dict(STATE)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def answer(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        state = self.server.state  # type: ignore[attr-defined]
        info = {**STATE, "internal_states": [state], "version": "0.5.12"}
        model = {"model_path": "a model", "architectures": ["LlamaForCausalLM"]}
        self.answer({"/server_info": info, "/model_info": model}[self.path])

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, given["name"]))  # type: ignore[attr-defined]
        self.answer([[0.5] * 32] * given["truncate_size"])

    def log_message(self, *args: Any) -> None: ...


ONCE = ["/server_info", "/model_info", *(("/get_weights_by_name", name) for name in NAMES)]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def sglang() -> Iterator[Any]:
    """NeMo-RL's SGLang module; skips the test if NeMo-RL lacks the module."""
    if not has_sglang():
        pytest.skip("before 0.6 NeMo-RL has no SGLang")
    with nemo_rl_on_cpu():
        yield importlib.import_module(MODULE)


def generation(sglang: Any, *urls: str | None) -> Any:
    """NeMo-RL's ``SGLangGeneration`` after its start, with the stand-in servers' URLs."""
    made = object.__new__(sglang.SGLangGeneration)
    made.needs_offload = False
    made.all_engines = []
    made._router_actor = made._http_client = made._async_loop = None
    made.worker_group = SimpleNamespace(shutdown=lambda **given: True)
    for name in ("get_rollout_engine_urls", "get_sglang_server_urls"):
        if hasattr(sglang.SGLangGeneration, name):
            setattr(made, name, lambda: list(urls))
    return made


def held(folder: Path) -> list[halves.Held]:
    return [one for _, one in halves.read(str(folder)) if isinstance(one, halves.Held)]


def test_servers_are_asked_when_a_weight_sync_ends(
    sglang: Any, shim: Any, server: Server, tmp_path: Path
) -> None:
    shim(settings={"audit_dir": str(tmp_path)})
    made = generation(sglang, server.url, None)  # None: a worker on an engine's second node
    made.prepare_for_generation(tags=["weights"])
    made.prepare_for_generation()
    assert server.asked == []
    syncs = []
    for _ in range(3):
        made.prepare_for_generation(tags=["kv_cache"])
        syncs += [one.sync for one in held(tmp_path)]
    assert syncs == [1, 2, 2]
    assert server.asked == ONCE * 2
    (one,) = held(tmp_path)
    assert (one.framework, one.subject, one.name) == ("nemo-rl", "rollout", server.url[7:])
    assert (one.engine, one.computes, one.kv_cache) == ("sglang 0.5.12", "fp16", "auto")
    assert one.weights is not None
    assert (one.weights.exact, one.weights.sampled) == (1.0, 2 * 32 * ROWS)


def test_new_servers_are_asked(
    sglang: Any, shim: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins replace the Ray cluster, GPUs, router and workers of NeMo-RL's start."""
    if not hasattr(sglang, "_start_router"):
        pytest.skip("before 0.7 the start is NeMo-RL's worker group, which needs GPUs in Ray")
    shim(settings={"audit_dir": str(tmp_path)})
    own = sglang.SGLangGeneration
    monkeypatch.setattr(sglang, "get_reordered_bundle", lambda pg: ([0], [0], None))
    monkeypatch.setattr(sglang, "_start_router", lambda config: ("127.0.0.1", 1, None))
    monkeypatch.setattr(
        sglang, "HttpClient", lambda config: SimpleNamespace(aclose=nothing, shutdown=lambda: None)
    )
    monkeypatch.setattr(own, "_start_engines", lambda self, cursors: ([], {}))
    monkeypatch.setattr(own, "get_rollout_engine_urls", lambda self: [server.url])
    cluster = SimpleNamespace(
        _init_placement_groups=lambda **given: [None],
        num_gpus_per_node=1,
        max_colocated_worker_groups=1,
    )
    servers = {"num_gpus_per_engine": 1, "num_gpus": 1, "needs_offload": False}
    config = {"sglang_server_config": servers, "model_path": "a model"}
    made = own(cluster, {"sglang_cfg": config})
    made.shutdown()
    assert [(one.sync, one.computes) for one in held(tmp_path)] == [(0, "fp16")]
    assert server.asked == ONCE


async def nothing() -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quantization": "fp8"}, "quantised weights"),
        ({"enable_lora": True}, "LoRA adapters"),
        ({"pp_size": 2}, "pipeline stages"),
    ],
)
def test_weights_that_a_server_cannot_tell_are_not_asked_for(
    sglang: Any, shim: Any, server: Server, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    shim(settings={"audit_dir": str(tmp_path)})
    server.state |= given
    generation(sglang, server.url).prepare_for_generation(tags=["kv_cache"])
    assert server.asked == ONCE[:2]
    (one,) = held(tmp_path)
    assert (one.computes, one.quantization) == ("fp16", given.get("quantization", ""))
    assert said in one.not_answered
    assert one.weights is None


def test_urls_that_cannot_be_had_do_not_end_the_rollout(
    sglang: Any, shim: Any, tmp_path: Path
) -> None:
    shim(settings={"audit_dir": str(tmp_path)})
    made = generation(sglang)

    def gone() -> list[str]:
        raise RuntimeError("the worker is gone")

    made.get_rollout_engine_urls = made.get_sglang_server_urls = gone
    made.prepare_for_generation(tags=["kv_cache"])
    (one,) = held(tmp_path)
    assert (one.name, one.sync) == ("servers", 1)
    assert one.not_answered == "RuntimeError: the worker is gone"


@pytest.mark.parametrize("settings", [{}, {"features": "-audit"}])
def test_without_an_audit_no_server_is_asked(
    sglang: Any, shim: Any, server: Server, tmp_path: Path, settings: dict[str, str]
) -> None:
    shim(**settings, **({"settings": {"audit_dir": str(tmp_path)}} if settings else {}))
    generation(sglang, server.url).prepare_for_generation(tags=["kv_cache"])
    assert server.asked == []
    assert held(tmp_path) == []


def test_which_backends_are_asked() -> None:
    assert why_not_asked("vllm") == ""
    assert (why_not_asked("sglang") == "") is has_sglang()
    assert why_not_asked("megatron") == "NeMo-RL's workers of megatron are not asked"
