"""NeMo-RL: audit the weights that a policy sends to the rollout.

Each worker, on DTensor or on Megatron, passes its stream of weights to one of three functions. The
shim patches the functions that receive weights, because a Ray actor ignores patches of its methods.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.adapting.audit import weight_audit

from ..config import FRAMEWORK

_UTILS = "nemo_rl.models.policy.utils"
_WORKERS = "nemo_rl.models.policy.workers"
_AUDIT: dict[str, Any] = {
    "feature": "audit",
    "group": "weights audit",
    "why": "gets the stream of weights of every kind of worker",
    "delete_when": "NeMo-RL says which precision its rollouts have",
    "optional": True,
}


@seam(
    at=[
        f"{_UTILS}:stream_weights_via_ipc_zmq_impl",
        {
            "target": f"{_UTILS}:stream_weights_via_http_impl",
            "only_if": (f"{_UTILS}:stream_weights_via_http_impl",),
        },
    ],
    **_AUDIT,
)
def look_at_stream(call: Call, params_generator: Any) -> Any:
    """Observe the stream of weights while NeMo-RL sends it."""
    seen = weight_audit.observe(params_generator, FRAMEWORK, "policy")
    call.arguments["params_generator"] = seen
    return call.proceed()


@seam(
    "nemo_rl.utils.packed_tensor:packed_broadcast_producer",
    aliases=tuple(
        f"{_WORKERS}.{kind}_policy_worker{version}:packed_broadcast_producer"
        for kind, version in (("dtensor", ""), ("dtensor", "_v2"), ("megatron", ""))
    ),
    relies_on=("next", "iterator"),
    **_AUDIT,
)
def look_at_broadcast(call: Call, iterator: Any) -> Any:
    """Observe the stream of weights while NeMo-RL broadcasts it to a rollout on other GPUs."""
    call.arguments["iterator"] = weight_audit.observe(iterator, FRAMEWORK, "policy")
    return call.proceed()
