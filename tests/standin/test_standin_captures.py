"""Captures: what a graph replays, and what breaks one that is under way."""

from __future__ import annotations

import ctypes
from threading import Thread
from typing import Any

import torch
from devices.tensors import full, held, runtime, take_device, value
from ranks.pool import Ranks

THREAD_LOCAL, RELAXED = 1, 2  # of cudaStreamCaptureMode


def replayed() -> list[int]:
    take_device()
    source, out = full(3), full(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(source)
    seen = [value(out)]
    for number in (3, 4):
        source.fill_(number)
        graph.replay()
        seen.append(value(out))
    return seen


def test_a_capture_does_nothing_and_each_replay_does_what_was_captured(ranks: Ranks) -> None:
    assert ranks.run(replayed, 1) == [[0, 3, 4]]


def forked() -> int:
    take_device()
    source, between, out = full(5), full(0), full(0)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with side:
            between.copy_(source)
        main.wait_stream(side)
        out.copy_(between)
    side.synchronize()
    graph.replay()
    return value(out)


def test_a_stream_that_waits_for_a_captured_event_is_captured_too(ranks: Ranks) -> None:
    assert ranks.run(forked, 1) == [5]


def captured_while(other_mode: int | None) -> tuple[str, str]:
    """What an event query of another thread says during a capture, and what the capture then says.

    `other_mode` is the capture mode that the thread chooses.
    """
    device = take_device()
    event = torch.Event(device)
    event.record()
    torch.cuda.synchronize()
    source, out = full(3), full(0)
    torch.cuda.synchronize()
    answers: list[str] = []

    def ask() -> None:
        if other_mode is not None:
            mode = ctypes.c_int(other_mode)
            runtime().cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        answers.append(said(event.query))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="global")
        out.copy_(source)
        other = Thread(target=ask)
        other.start()
        other.join()
        return answers[0], said(graph.capture_end)


def said(call: Any) -> str:
    try:
        return str(call())
    except RuntimeError as error:
        return str(error).splitlines()[0]


def test_a_query_of_another_thread_is_refused_and_breaks_a_global_capture(ranks: Ranks) -> None:
    query, end = ranks.run(captured_while, 1, None)[0]
    assert "not permitted when stream is capturing" in query
    assert "previous error during capture" in end


def test_a_thread_in_thread_local_mode_may_ask(ranks: Ranks) -> None:
    assert ranks.run(captured_while, 1, THREAD_LOCAL) == [("True", "None")]
    assert ranks.run(captured_while, 1, RELAXED) == [("True", "None")]


def begun_behind_busy_streams() -> tuple[bool, bool]:
    take_device()
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(300_000_000)
    with held(other), torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        # A query would break the capture: both are looked at once it is over.
        graph.capture_end()
        return torch.cuda.default_stream().query(), other.query()


def test_torch_waits_for_the_default_stream_and_no_other_as_a_capture_begins(ranks: Ranks) -> None:
    assert ranks.run(begun_behind_busy_streams, 1) == [(True, False)]
