"""Where the library's own log goes inside the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from commlayer_vllm.log import show_library_log
from ranks import here
from ranks.pool import Ranks
from stand_in import connected_group, end, installed


class Recording(logging.Handler):
    """A handler as the engine has one on its logger."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.fixture
def library() -> Iterator[logging.Logger]:
    library = logging.getLogger("commlayer")
    before = library.handlers[:], library.propagate
    yield library
    library.handlers[:], library.propagate = before


@pytest.fixture
def engine() -> Iterator[Recording]:
    handler = Recording()
    logging.getLogger("vllm").addHandler(handler)
    yield handler
    logging.getLogger("vllm").removeHandler(handler)


def test_warnings_of_the_library_appear_in_the_engines_log(
    library: logging.Logger, engine: Recording
) -> None:
    show_library_log()
    show_library_log()
    library.warning("rank 1 is stalled")
    library.info("too much detail")
    assert engine.seen == ["rank 1 is stalled"]


def test_without_a_log_of_the_engine_nothing_is_changed(library: logging.Logger) -> None:
    before = library.handlers[:], library.propagate
    show_library_log()
    assert (library.handlers, library.propagate) == before


def test_a_log_that_the_user_has_set_up_is_left_alone(
    library: logging.Logger, engine: Recording
) -> None:
    own = Recording()
    library.addHandler(own)
    show_library_log()
    library.warning("rank 1 is stalled")
    assert (own.seen, engine.seen) == (["rank 1 is stalled"], [])


class Awaited(Recording):
    """Tells when a report has come."""

    def __init__(self) -> None:
        super().__init__()
        self.reported = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if "commlayer report" in self.seen[-1]:
            self.reported.set()


def a_stage_that_does_not_send() -> list[str]:
    handler = Awaited()
    logging.getLogger("vllm").addHandler(handler)
    group = connected_group()
    installed(group, stall_timeout=0.4)
    if group.rank_in_group == 1:
        result, (received,), _ = group.irecv_tensor_dict()
        assert handler.reported.wait(60)
        here.meet("reported")
        received.wait(20)
        assert result == {"step": 3}
    else:
        here.meet("reported")
        group.send_tensor_dict({"step": 3})
    end(group)
    return handler.seen


def test_a_stall_is_reported_in_the_engines_log(ranks: Ranks) -> None:
    _, seen = ranks.run(a_stage_that_does_not_send, 2, timeout=60)
    (report, *_) = [text for text in seen if "commlayer report" in text]
    assert "rank 1 of 2): something has not moved for" in report
    assert "irecv_tensor_dict from rank 0" in report
