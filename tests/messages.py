"""All errors and warnings of the shim, read from the source, and their list in the docs.

    python -m tests.messages        # writes the list in docs/troubleshooting.md anew

A message is the text in ``raise SomeError(...)`` or ``warn(...)`` of ours, or in a function that
returns an error. The texts collected under a name of ``PARTS`` are messages, too. ``…`` replaces
each value that is inserted. :func:`messages` also returns the places that pass on another
function's message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- messages -->", "<!-- /messages -->"
ERRORS = ("ShimError", "SettingsError", "DtypeError", "SeamError", "SourceError", "PrecisionError")
ERRORS += ("LayoutError", "LossScaleError", "CheckpointError", "UnreadableError")
ERRORS += ("AuditError", "PlanError", "AnotherSaveError")
WARNINGS = ("warn",)
PARTS = ("message", "problem", "problems", "warnings", "bucket_warning")
"""Names under which the source stores or collects a text before it is shown."""
SETTINGS, DTYPES, STATES = "Settings, start and status", "Dtypes", "Optimizer states and buckets"
SCALING, AUDIT, PLAN = "Loss scaling", "Audit and lost updates", "Plan"
CHECKPOINTS, SEAMS, COMMANDS = "Checkpoints", "Adapters and seams", "Command line"
SIDES = "Trainer and rollout"
HEADINGS = (SETTINGS, DTYPES, STATES, SCALING, SIDES, AUDIT, CHECKPOINTS, PLAN, COMMANDS, SEAMS)
"""The headings in the docs, in their order."""
OF_AN_ERROR = {
    "SettingsError": SETTINGS,
    "DtypeError": DTYPES,
    "InconsistentPrecisionError": STATES,
    "UnsupportedPrecisionError": STATES,
    "LossScaleError": SCALING,
    "ScalerCheckpointError": SCALING,
    "ScalerOfAnotherSaveError": SCALING,
    "AuditError": AUDIT,
    "CheckpointLayoutError": CHECKPOINTS,
    "CheckpointUnreadableError": CHECKPOINTS,
    "PlanError": PLAN,
    "SourceError": COMMANDS,
    "SeamError": SEAMS,
}
"""Maps each class of errors to its heading; ``OF_A_TEXT`` has the headings of warnings."""
OF_A_TEXT = {
    # errors with another heading than the rest of their class
    "--config …": COMMANDS,
    "--set …": COMMANDS,
    "audit(expected=...): …=…": AUDIT,
    "watch_updates(every=…)": AUDIT,
    "min_loss_scale=…": SCALING,
    "a step came before the gradients were unscaled": SCALING,
    "Megatron scales no loss then": SCALING,
    "its float16 training gets no loss scaling": SCALING,
    "precision_shim's audit under strict": AUDIT,
    "weights reach the rollout rounded to bf16": SIDES,
    # warnings, and texts of the doctor
    "the weights are rounded to … on the way": SIDES,
    "checkpoint_engine.backend=delta_sharded": SIDES,
    "dtype the engine takes is known only to the engine": SIDES,
    "computes in … (…), the … in …": SIDES,
    "because it takes effect in all engines or in none": SIDES,
    "the LM head of … is a …": SIDES,
    "whose weight gradient is not deferred": SIDES,
    "and its weights go out in": SIDES,
    "start-up file is not active": SETTINGS,
    "_FRAMEWORKS names …, which is not installed": SETTINGS,
    "nothing to patch here": SETTINGS,
    "on Megatron: …. Install TransformerEngine": STATES,
    "gives the gradient bucket another dtype": STATES,
    "brings Megatron's HybridDeviceOptimizer": STATES,
    "makes exp_avg_sq bf16": STATES,
    "the states follow the model": STATES,
    "the OptimizerConfig is for … parameters": STATES,
    "main grads, the gradient bucket is": STATES,
    "the layer-wise optimizer's parameter layout": STATES,
    "Let fp16, bf16 and main_grads_dtype": STATES,
    "FusedAdam has no argument": STATES,
    "expect 'No dot product attention": DTYPES,
    "is a key that verl never reads": DTYPES,
    "nemo_automodel rounds its own models": DTYPES,
    "Megatron optimizer checkpoint": CHECKPOINTS,
    "masters of fp32 parameters are not these parameters' values": CHECKPOINTS,
    "optimizer checkpoint, sharding type": CHECKPOINTS,
    "the optimizer checkpoint's fp32 masters were rounded": CHECKPOINTS,
    "weights were loaded without the optimizer's states": CHECKPOINTS,
    "cannot be copied": CHECKPOINTS,
    "Training continues with a fresh scaler": SCALING,
    "no loss scaler state at": SCALING,
    "check_for_nan_in_grad=True is the user's": SCALING,
    "checks gradients by itself": SCALING,
    "the loss was not scaled in this step": SCALING,
    "the loss is scaled twice": SCALING,
    "have different loss scales": SCALING,
    "float16 trains without loss scaling": SCALING,
    "formed outside of its train_step": SCALING,
    "the shim cannot scale its loss": SCALING,
    "it trains in another dtype, and the loss is not scaled": SCALING,
    "writes nothing: its torchtitan engine saves only": CHECKPOINTS,
    "is no fp16 training here": SCALING,
    "mixed_precision.param_dtype=float16, but": SCALING,
    "expected …, found …": AUDIT,
    "were rounded away": AUDIT,
    "the audit was not written": AUDIT,
}
"""Maps part of a message to its heading, for warnings and for errors unlike their class."""


def heading(kind: str, text: str) -> str:
    """The heading for a message, as declared below.

    Raises:
        LookupError: the message has no declared heading, or two.
    """
    declared = {place for part, place in OF_A_TEXT.items() if part in text}
    place = declared or {OF_AN_ERROR[kind]} if kind in OF_AN_ERROR else declared
    if len(place) != 1:
        raise LookupError(
            f"{kind}: {text!r} has {len(place) or 'no'} heading(s) in OF_A_TEXT or OF_AN_ERROR of "
            "tests/messages.py; declare what it is about"
        )
    return next(iter(place))


@dataclass(frozen=True, order=True)
class Message:
    """One message: its heading, its text with ``…`` for inserted values, and its kind."""

    group: str
    text: str
    kind: str


def messages() -> tuple[list[Message], list[str]]:
    """All messages, and the places (file: expression) whose text the source does not contain."""
    found: set[Message] = set()
    elsewhere: set[str] = set()
    for root in (ROOT / "shim", ROOT / "adapters"):
        for file in sorted(root.glob("*/**/*.py")):
            folder = file.parent.relative_to(root).as_posix()
            if folder == "precision_shim/testing":  # for tests, not for jobs
                continue
            for kind, text in _in_file(ast.parse(file.read_text(encoding="utf-8"))):
                if text.startswith("<"):
                    elsewhere.add(f"{folder}/{file.name}: {text[1:]}")
                else:
                    found.add(Message(heading(kind, text), text, kind))
    return sorted(found), sorted(elsewhere)


def _in_file(tree: ast.Module) -> Iterator[tuple[str, str]]:
    seen: set[ast.AST] = set()
    # Inner functions come first, because their names take precedence.
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    for function in reversed(functions):
        names: dict[str, str] = {}
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    names[name] = _text(value, {}) or names.get(name, "")
        for node in ast.walk(function):
            if node in seen:
                continue
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in PARTS:
                    if text := _text(value, names):
                        yield "warning", text
                    continue
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append")) if (
                    name in PARTS
                ):
                    if text := _text(node.args[0], names):
                        yield "warning", text
                    continue
                case ast.Raise(exc=ast.Call() as call) | ast.Return(value=ast.Call() as call):
                    wanted = ERRORS
                case ast.Expr(value=ast.Call() as call):
                    wanted = WARNINGS
                case _:
                    continue
            name = ast.unparse(call.func).rpartition(".")[2]
            if name.endswith(wanted) and call.args:
                seen.add(node)
                text = _text(call.args[0], names)
                kind = "warning" if wanted is WARNINGS else name
                yield kind, text or f"<{ast.unparse(call.args[0])}"


def _text(node: ast.expr, names: dict[str, str]) -> str | None:
    """The text of an expression, or ``None`` if the source does not contain it."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            parts = [one.value if isinstance(one, ast.Constant) else "…" for one in values]
            joined = re.sub(r"…[…\s]*…", "…", "".join(map(str, parts)))
            return joined if re.search(r"\w{3}", joined) else None
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_text(left, names) or "…") + (_text(right, names) or "…")
        case ast.Name(id=name):
            return names.get(name) or None
        case ast.IfExp(body=body, orelse=other):
            return _text(body, names) or _text(other, names)
    return None


def listed(found: list[Message]) -> str:
    """Format the messages as Markdown, by heading."""
    lines = []
    for group in HEADINGS:
        kinds: dict[str, set[str]] = {}
        for one in found:
            if one.group == group:
                kinds.setdefault(one.text, set()).add(one.kind)
        if kinds:
            lines += ["", f"### {group}", ""]
            for text in sorted(kinds, key=lambda text: text.lstrip("… :=.,")):
                shown = " ".join(text.split())
                ticks = "``" if "`" in shown else "`"
                lines.append(f"- {ticks}{shown}{ticks} ({', '.join(sorted(kinds[text]))})")
    return "\n".join([*lines, ""])


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    text = listed(messages()[0])
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
