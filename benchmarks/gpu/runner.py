"""Starts the workers, stores their messages, and ends the run at its time limit."""

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
"""Seconds that a worker has to end by itself, and again after SIGTERM, before SIGKILL."""


class Runner:
    """One run of the proof.

    Args:
        store: stores the results.
        parts: the parts to run, in this order.
        dry: whether to run on a CPU.
        minutes: time limit of the run.
    """

    def __init__(self, store: Store, parts: Sequence[Part], *, dry: bool, minutes: float) -> None:
        self.store = store
        self.dry = dry
        self.ends_at = time.time() + 60 * minutes
        self._waiting = list(parts)

    def run(self) -> None:
        """Run all parts; return at their end or at the time limit."""
        try:
            while self._waiting:
                part = self._waiting[0]
                reason = part.too_late(self.ends_at - time.time(), self.dry)
                if reason:
                    self._waiting.pop(0)
                    self._state(part.name, "not run", reason)
                else:
                    # One worker runs a whole dry run: its imports take longer than its parts,
                    # and it measures no memory.
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
        """Run some parts in one worker; remove the begun parts from ``_waiting``."""
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
        """Store the worker's messages; return whether its pipe closed before the time limit."""
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
    """The environment variables of a worker, without the shim's variables.

    With the shim's variables the start-up file would patch frameworks before a part asks for it.
    """
    names = {key: text for key, text in os.environ.items() if not key.startswith("PRECISION_SHIM")}
    site = str(Path(__file__).with_name("site"))
    names["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
    names["PYTHONUNBUFFERED"] = "1"
    # With one connection the GPU executes kernels in launch order, as Megatron's collectives need.
    names["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if any(part.repeatable for part in batch):
        # cuBLAS is deterministic only if each stream has its own workspace.
        names["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return names


def end(worker: subprocess.Popen[Any]) -> int | None:
    """Wait for a worker, terminate it if it does not end, and return its exit status."""
    for last_resort in (None, worker.terminate, worker.kill):
        if last_resort is not None:
            last_resort()
        try:
            return worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    return worker.wait()
