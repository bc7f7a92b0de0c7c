"""Starts the workers, keeps what they tell, and holds the run to its time."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .plan import Part
from .store import Store

ROOT = Path(__file__).resolve().parents[2]
LOG_NAME = "proof.log"
ENDED = "the run was ended from outside"
GRACE_S = 5.0
"""A worker that is over its time is asked to end, and is killed so much later."""


class Runner:
    """One run.

    Args:
        store: where results go.
        parts: what to run, in this order.
        dry: on a CPU.
        minutes: when it has to be over.
    """

    def __init__(self, store: Store, parts: Sequence[Part], *, dry: bool, minutes: float) -> None:
        self.store = store
        self.dry = dry
        self.ends_at = time.time() + 60 * minutes
        self._waiting = list(parts)

    def run(self) -> None:
        """Run all of it; returns when it is done or the time is up."""
        try:
            while self._waiting:
                part = self._waiting[0]
                reason = part.too_late(self.ends_at - time.time(), self.dry)
                if reason:
                    self._waiting.pop(0)
                    self._state(part.name, "not run", reason)
                else:
                    # A dry run measures no memory, and its imports take longer than its parts.
                    batch = list(self._waiting) if self.dry else [part]
                    self._work(batch)
        finally:
            for part in self._waiting:
                begun = self.store.part(part.name)["state"]
                if begun == "running":
                    self._state(part.name, "cut short", ENDED)
                elif begun == "waiting":
                    self._state(part.name, "not run", ENDED)
            self.store.close()

    def _state(self, part: str, state: str, reason: str) -> None:
        self.store.take({"kind": "state", "part": part, "state": state, "reason": reason})

    def _work(self, batch: list[Part]) -> None:
        """Run one worker on some parts, and take those that it began from the list."""
        read, write = os.pipe()
        spec = {
            "parts": [part.to_dict() for part in batch],
            "dry": self.dry,
            "ends_at": self.ends_at,
        }
        command = [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(spec), str(write)]
        with (self.store.path.parent / LOG_NAME).open("ab") as log:
            worker = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(batch),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
            )
        os.close(write)
        try:
            in_time = self._listen(read)
        finally:
            os.close(read)
            ended = end(worker)
        self._settle(batch, in_time, ended)

    def _listen(self, read: int) -> bool:
        """Keep what the worker tells; whether it ended before the time was up."""
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(read, selectors.EVENT_READ)
            while True:
                left = self.ends_at - time.time()
                if left <= 0:
                    return False
                if not selector.select(left):
                    continue
                chunk = os.read(read, 1 << 16)
                if not chunk:
                    return True
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if message["kind"] == "state":
                        print(f"{message['part']}: {message['state']}", file=sys.stderr, flush=True)
                    self.store.take(message)

    def _settle(self, batch: list[Part], in_time: bool, ended: int | None) -> None:
        begun = [part for part in batch if self.store.part(part.name)["state"] != "waiting"]
        for part in begun:
            if self.store.part(part.name)["state"] == "running":
                if in_time:
                    reason = f"its process ended with status {ended}; the end of the log says why"
                    self._state(part.name, "failed", reason)
                else:
                    self._state(part.name, "cut short", "the time of --minutes was up")
        if not begun and in_time:
            begun = batch[:1]
            reason = f"its process ended with status {ended} before it began; see the log"
            self._state(begun[0].name, "failed", reason)
        self._waiting = [part for part in self._waiting if part not in begun]


def environment(batch: Sequence[Part]) -> dict[str, str]:
    """A worker's variables: the shim as the repository has it, and only where a part asks for it.

    The parts call ``install()`` themselves. Without the variables of the start-up nothing is
    patched that they did not ask for.
    """
    names = {key: text for key, text in os.environ.items() if not key.startswith("PRECISION_SHIM")}
    site = str(Path(__file__).with_name("site"))
    names["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
    names["PYTHONUNBUFFERED"] = "1"
    # Megatron's collectives are given one GPU's order of work by it.
    names["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if any(part.repeatable for part in batch):
        # cuBLAS gives the same bits each time only with a workspace of its own per stream.
        names["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return names


def end(worker: subprocess.Popen[Any]) -> int | None:
    """Wait for a worker that closed its pipe, or end it; its exit status."""
    for last_resort in (None, worker.terminate, worker.kill):
        if last_resort is not None:
            last_resort()
        try:
            return worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    return worker.wait()
