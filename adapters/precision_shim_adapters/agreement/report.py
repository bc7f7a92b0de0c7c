"""Report the dtypes of both sides of a job, and write the keys that the user asks the shim for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precision_shim.adapting import Decision, Findings, Settings, current_settings, report
from precision_shim.precision import agreement
from precision_shim.precision.agreement import Engine, Gate, judge_engines, judge_gates
from precision_shim.precision.lm_head import Head, judge_heads
from precision_shim.reporting.journal import decisions

FEATURE = agreement.FEATURE

Write = Callable[[str, Any], object]
"""A function that sets a key of the job's config to a value such as ``"float16"``."""


@dataclass(frozen=True)
class Sides:
    """Both sides of a job, as an adapter read them from the job's config.

    Attributes:
        framework: the framework's name.
        where: framework and version, such as ``"verl 0.9.1"``.
        trainer: the trained policy; ``None`` if its dtype is not known.
        others: the job's other engines: the rollout, the reference model and teachers.
        heads: the LM heads of the trainer and of the other engines.
        gates: the routers of the trainer and of the rollout; empty for a model without experts.
        decided: what the adapter decided on the job's dtypes.
    """

    framework: str
    where: str
    trainer: Engine | None = None
    others: Sequence[Engine] = ()
    heads: Sequence[Head] = ()
    decided: tuple[Decision, ...] = ()
    gates: Sequence[Gate] = ()

    def judge(
        self, settings: Settings, *, may_write: bool, here: bool = True
    ) -> tuple[Findings, dict[str, Any]]:
        """Judge the job's LM heads, and compare its engines with the trainer.

        For ``may_write``, ``here`` and the result see ``judge_heads``.
        """
        asked = settings["head"] == "fp32"
        job = self.framework, self.where
        found, writes = judge_heads(*job, self.heads, asked=asked, may_write=may_write, here=here)
        found += Findings(self.decided) + judge_gates(self.framework, self.gates)
        if self.trainer is None:
            return found, {**writes}
        follow = settings["rollout"] == "follow"
        more, keys = judge_engines(
            *job, self.trainer, self.others, follow=follow, may_write=may_write
        )
        return found + more, {**writes, **keys}


def report_sides(sides: Sides, write: Write | None = None) -> None:
    """Report both sides of a job in its driver, and write the keys that the user asks for.

    ``write`` is ``None`` if the framework has already copied the config.

    Raises:
        UnsupportedPrecisionError: in strict mode, an engine disagrees with an fp16 trainer or
            refuses the model in fp16, or an engine cannot compute its LM head in fp32.
    """
    found, writes = sides.judge(current_settings(), may_write=write is not None)
    if write is not None:
        for key, value in writes.items():
            write(key, value)
    # A framework may check its config twice: do not report a decision of the first check again.
    said = {(one.subject, one.chosen) for one in decisions() if one.feature == FEATURE}
    new = (one for one in found.decisions if (one.subject, one.chosen) not in said)
    report(replace(found, decisions=tuple(new)))
