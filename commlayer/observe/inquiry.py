"""Ranks ask each other what they wait for."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable

from commlayer.observe.survey import Survey
from commlayer.tracking.operation import Operation
from commlayer.tracking.runtime import Event
from commlayer.wire.connection import Connection
from commlayer.wire.control import Answer, Ask
from commlayer.wire.frame import protocol_error
from commlayer.wire.pending import RankState

_ON_THEIR_WAY = 8
"""How many questions, and how many answers, to one peer may be under way."""


class _Question:
    """One inquiry of this rank, and the answers so far."""

    def __init__(self, asked: set[int], event: Event) -> None:
        self.open = asked
        self.states: dict[int, RankState] = {}
        self.complete = event


class Inquiry:
    """Asks all peers, and answers theirs.

    A few questions and answers to a peer are on their way at a time; what comes
    beyond that is not answered.  Answers are given by the driver of the
    control lane, whatever the threads of the program do; where a transport
    moves only in calls, in the next call.

    `alarmed` is called when a peer asks because something of its own is stuck.
    """

    def __init__(
        self, connection: Connection, survey: Survey, alarmed: Callable[[int], None]
    ) -> None:
        self._connection = connection
        self._survey = survey
        self._alarmed = alarmed
        self._numbers = itertools.count()
        self._lock = connection.runtime.lock()
        self._questions: dict[int, _Question] = {}
        self._sent: defaultdict[tuple[type, int], deque[Operation]] = defaultdict(deque)
        connection.inquired = self._heard

    def ask(self, timeout: float, *, stalled: bool = False) -> dict[int, RankState]:
        """The states of this rank and of every peer that answers within `timeout` seconds."""
        connection = self._connection
        question = _Question(set(connection.peers), connection.runtime.event())
        number = next(self._numbers)
        with self._lock:
            self._questions[number] = question
        try:
            for rank in connection.peers:
                if not self._tell(rank, Ask(number, stalled)):
                    self._close(question, rank)
            if question.open:
                connection.progress.block(question.complete, timeout)
        finally:
            with self._lock:
                del self._questions[number]
        return {connection.rank: self._survey.look(), **question.states}

    def _tell(self, rank: int, message: Ask | Answer) -> bool:
        sent = self._sent[type(message), rank]
        with self._lock:
            while sent and sent[0].settled:
                sent.popleft()
            if len(sent) >= _ON_THEIR_WAY:
                return False
        operation = self._connection.tell(rank, message)
        if operation is not None:
            sent.append(operation)
        return operation is not None

    def _close(self, question: _Question, rank: int) -> None:
        question.open.discard(rank)
        if not question.open:
            question.complete.set()

    def _heard(self, rank: int, message: Ask | Answer) -> None:
        if isinstance(message, Ask):
            self._tell(rank, Answer(message.number, self._survey.look()))
            if message.stalled:
                self._alarmed(rank)
            return
        if message.state.rank != rank:
            raise protocol_error(f"control message of rank {rank}", "it speaks for another rank")
        with self._lock:
            question = self._questions.get(message.number)
        if question is not None and rank in question.open:
            question.states[rank] = message.state
            self._close(question, rank)
