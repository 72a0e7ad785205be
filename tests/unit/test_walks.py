"""How far a reader has to walk: the calls, classes and files of one send and of one receive.

Counted are the library's own frames, comprehensions left out, in the steady state: the
lanes are there, the shapes are known.  A file that is entered again after it was left
counts as a re-entry.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from commlayer_testkit.local import connected, eventually

import commlayer

ROOT = str(Path(commlayer.__file__).parent)
INLINE, APART = 8, 100_000
"""Elements of tensors that travel in the header, and of those that are messages of their own."""


class Walk:
    """What the library called, in order, while it was recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT) or code.co_name[0] == "<":
            return
        owner = frame.f_locals.get("self")
        kind = "" if owner is None else type(owner).__name__
        self.calls.append((code.co_filename[len(ROOT) + 1 :], kind, code.co_name))

    @property
    def classes(self) -> set[str]:
        return {kind for _, kind, _ in self.calls if kind}

    @property
    def files(self) -> set[str]:
        return {file for file, _, _ in self.calls}

    @property
    def names(self) -> set[str]:
        return {name for _, _, name in self.calls}

    @property
    def reentries(self) -> int:
        files = [file for file, _, _ in self.calls]
        moves = [file for number, file in enumerate(files) if [file] != files[number - 1 : number]]
        return len(moves) - len(self.files)

    def up_to(self, file: str, name: str) -> None:
        """Forget what came after the first call of `name` in `file`."""
        found = next(n for n, call in enumerate(self.calls) if (call[0], call[2]) == (file, name))
        del self.calls[found + 1 :]

    def __str__(self) -> str:
        return "\n".join(" ".join(call) for call in self.calls)


def tensors(elements: int) -> dict[str, torch.Tensor]:
    return {"hidden": torch.ones(elements), "residual": torch.ones(elements)}


def warm(a: Any, b: Any, elements: int) -> None:
    """Let the shape become known, and earn its slot."""
    for _ in range(5):
        handle = b.irecv_tensor_dict(0)
        a.isend_tensor_dict(tensors(elements), 1).wait(30)
        handle.result(30)


def test_a_send_is_a_short_walk() -> None:
    with connected(check_lifetime=False) as (a, b):
        warm(a, b, INLINE)
        handle, message, walk = b.irecv_tensor_dict(0), tensors(INLINE), Walk()
        sys.setprofile(walk)
        try:
            a.isend_tensor_dict(message, 1)
        finally:
            sys.setprofile(None)
        handle.result(30)
    assert {"isend_tensor_dict", "_post_native"} <= walk.names
    assert len(walk.calls) <= 30, str(walk)
    assert len(walk.classes) <= 10, str(walk)
    assert len(walk.files) <= 10, str(walk)


def received(elements: int) -> Walk:
    """What the thread of the lane calls from the message to the result."""
    walk, thread = Walk(), threading.local()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if not hasattr(thread, "name"):
            # Asking for the current thread registers one that has not begun: ask once it has.
            thread.name = ""
            thread.name = threading.current_thread().name
        if thread.name == watched:
            walk(frame, event, argument)

    watched = ""
    threading.setprofile(profile)
    try:
        with connected(check_lifetime=False) as (a, b):
            warm(a, b, elements)
            handle = b.irecv_tensor_dict(0)
            lane = b._connection.peers[0].receives["data", "objects"]
            assert eventually(lambda: len(lane._posted) == lane._prefetch.headers)
            watched = f"commlayer {lane.name}"
            a.isend_tensor_dict(tensors(elements), 1)
            handle.result(30)
            assert eventually(lambda: "_settle" in walk.names)
            watched = ""
    finally:
        threading.setprofile(None)
    walk.up_to("progress/ledger.py", "_settle")
    return walk


def test_a_receive_is_a_short_walk() -> None:
    for elements in (INLINE, APART):
        walk = received(elements)
        assert {"steps", "value"} <= walk.names
        assert len(walk.calls) <= 40, str(walk)
        assert walk.reentries <= 12, str(walk)
