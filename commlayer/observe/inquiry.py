"""Ranks ask each other what they wait for."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from commlayer.lanes.connection import Connection
from commlayer.observe.survey import Survey
from commlayer.wire.control import Answer, Ask
from commlayer.wire.frame import protocol_error
from commlayer.wire.rank_state import RankState


class _Question:
    """One inquiry of this rank, and the answers so far."""

    def __init__(self, connection: Connection) -> None:
        self.open = set(connection.peers)
        self.states: dict[int, RankState] = {}
        self.complete = connection.runtime.event()
        self._connection = connection

    def close(self, rank: int) -> None:
        self.open.discard(rank)
        if not self.open:
            self._connection.signal(self.complete)


class _Mailbox:
    """Messages of one kind to one peer: one is on its way, and the newest of all others waits."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        # Guards `_busy` and `_waiting`; messages are posted after it.
        self._lock = connection.runtime.lock()
        self._busy = False
        self._waiting: Ask | Answer | None = None

    def send(self, message: Ask | Answer) -> bool:
        """Send `message`, or one that stands for it; False where that is not possible."""
        with self._lock:
            if self._busy:
                self._waiting = _newest(self._waiting, message)
                return True
            self._busy = True
        return self._post(message)

    def _post(self, message: Ask | Answer) -> bool:
        if self._connection.send_inquiry(self._rank, message, self._left):
            return True
        with self._lock:
            self._busy, self._waiting = False, None
        return False

    def _left(self) -> None:
        with self._lock:
            message, self._waiting = self._waiting, None
            self._busy = message is not None
        if message is not None:
            self._post(message)


def _newest(waiting: Ask | Answer | None, message: Ask | Answer) -> Ask | Answer:
    if isinstance(waiting, Ask) and isinstance(message, Ask):
        return Ask(max(waiting.number, message.number), waiting.stalled or message.stalled)
    if waiting is None or waiting.number <= message.number:
        return message
    return waiting


class Inquiry:
    """Asks all peers, and answers theirs.

    Every question is answered, however many there are: an answer is one to all
    questions up to its number, so that one question and one answer at a time to a
    peer suffice, and a peer that asks without end or does not listen makes nothing
    grow.  Answers are given by the driver of the control lane, whatever the
    threads of the program do; where a transport moves only in calls, in the next
    call.

    `alarmed` is called when a peer asks because something of its own is stuck.
    """

    def __init__(
        self, connection: Connection, survey: Survey, alarmed: Callable[[int], None]
    ) -> None:
        self._connection = connection
        self._survey = survey
        self._alarmed = alarmed
        self._numbers = itertools.count()
        # Guards the questions that are open; they are answered outside it.
        self._lock = connection.runtime.lock()
        self._questions: dict[int, _Question] = {}
        self._asks = {rank: _Mailbox(connection, rank) for rank in connection.peers}
        self._answers = {rank: _Mailbox(connection, rank) for rank in connection.peers}
        connection.inquired = self._heard

    def ask(self, timeout: float, *, stalled: bool = False) -> dict[int, RankState]:
        """The states of this rank and of every peer that answers within `timeout` seconds."""
        connection = self._connection
        question = _Question(connection)
        with self._lock:
            number = next(self._numbers)
            self._questions[number] = question
        try:
            for rank, mailbox in self._asks.items():
                if not mailbox.send(Ask(number, stalled)):
                    question.close(rank)
            if question.open:
                connection.block(question.complete, timeout)
        finally:
            with self._lock:
                del self._questions[number]
        return {connection.rank: self._survey.look(), **question.states}

    def _heard(self, rank: int, message: Ask | Answer) -> None:
        if isinstance(message, Ask):
            self._answers[rank].send(Answer(message.number, self._survey.look()))
            if message.stalled:
                self._alarmed(rank)
            return
        if message.state.rank != rank:
            raise protocol_error(f"control message of rank {rank}", "it speaks for another rank")
        with self._lock:
            answered = [q for number, q in self._questions.items() if number <= message.number]
        for question in answered:
            if rank in question.open:
                question.states[rank] = message.state
                question.close(rank)
