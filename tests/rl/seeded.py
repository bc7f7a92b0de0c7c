"""Sampling that a second job repeats bit for bit, by two classes that verl's config names.

Each answer has its own seed, and vLLM computes one answer at a time (``max_num_seqs=1``), so no
answer depends on others. The trainer gets the answers in a fixed order.
"""

from __future__ import annotations

from typing import Any

from examples.demo.rl.sampler import Sampler as Demos
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class Loop(SingleTurnAgentLoop):
    """verl's own loop, with a seed for each answer."""

    async def run(self, sampling_params: dict[str, Any], **named: Any) -> Any:
        seed = 1000 * int(named["index"]) + int(named["session_id"])
        return await super().run({**sampling_params, "seed": seed}, **named)


class Sampler(Demos):
    """verl's own sampler, with the answers in the order of prompts and seeds."""

    def _materialize_batch(self, partition_id: str, *given: Any, **named: Any) -> Any:
        prompts = {uid: i for i, uid in enumerate(self.prompt_global_steps[partition_id])}
        batch = super()._materialize_batch(partition_id, *given, **named)

        def place(key: str) -> tuple[int, ...]:
            uid, session, output = key.split("_")
            return prompts[uid], int(session), int(output)

        order = sorted(range(len(batch.keys)), key=lambda i: place(batch.keys[i]))
        batch.keys = [batch.keys[i] for i in order]
        batch.tags = [batch.tags[i] for i in order]
        return batch
