"""A pipeline of two stages on two devices generates what its model says.

The model moves bytes and computes on the host only, so that it runs where kernels do
not: an embedding is a copy of a table's row, a layer writes its mark into a column, and
the last stage reads the next token from the two.
"""

from __future__ import annotations

import torch
from devices.pair import connect
from ranks.pool import Ranks
from torch import Tensor

from commlayer.communicator import Communicator

VOCABULARY, WIDTH, BATCH, MICROBATCHES, STEPS = 50, 4096, 4, 3, 6


def prompt(microbatch: int) -> list[int]:
    return [(7 * microbatch + 3 * row) % VOCABULARY for row in range(BATCH)]


def next_tokens(tokens: list[int], step: int) -> list[int]:
    """What the model says: the whole of it."""
    return [(token + step + 1) % VOCABULARY for token in tokens]


def expected() -> list[list[list[int]]]:
    """By microbatch and step."""
    said = []
    for microbatch in range(MICROBATCHES):
        tokens, steps = prompt(microbatch), []
        for step in range(STEPS):
            tokens = next_tokens(tokens, step)
            steps.append(tokens)
        said.append(steps)
    return said


class FirstStage:
    """Embeds the tokens and marks the step."""

    def __init__(self, device: torch.device) -> None:
        rows = torch.arange(VOCABULARY, dtype=torch.float32).repeat_interleave(WIDTH)
        self._table = rows.reshape(VOCABULARY, WIDTH).to(device)

    def forward(self, tokens: Tensor, step: int) -> dict[str, Tensor]:
        hidden = torch.empty((BATCH, WIDTH), device=self._table.device)
        for row, token in enumerate(tokens.tolist()):
            hidden[row].copy_(self._table[token])
        residual = torch.full_like(hidden, float(step))
        return {"hidden": hidden, "residual": residual}


class LastStage:
    """Reads the next token from what it is given, all of which must have arrived."""

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        embedded, steps = hidden.cpu(), residual.cpu()
        assert bool((embedded == embedded[:, :1]).all()), "a row is made of two messages"
        assert bool((steps == steps[0, 0]).all()), "the residual is made of two messages"
        tokens = [int(token) for token in embedded[:, 0]]
        return torch.tensor(next_tokens(tokens, int(steps[0, 0])))


def run_first(comm: Communicator, device: torch.device) -> list[list[list[int]]]:
    stage = FirstStage(device)
    tokens = [torch.tensor(prompt(microbatch)) for microbatch in range(MICROBATCHES)]
    said: list[list[list[int]]] = [[] for _ in range(MICROBATCHES)]
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            comm.isend_tensor_dict(dict(stage.forward(tokens[microbatch], step)), 1)
        for microbatch in range(MICROBATCHES):
            tokens[microbatch] = comm.broadcast(None, 1).cpu()
            said[microbatch].append(tokens[microbatch].tolist())
    return said


def run_last(comm: Communicator, device: torch.device) -> list[list[list[int]]]:
    stage = LastStage()
    side = torch.cuda.Stream(device)
    said: list[list[list[int]]] = [[] for _ in range(MICROBATCHES)]
    for _ in range(STEPS):
        arriving = [comm.irecv_tensor_dict(0) for _ in range(MICROBATCHES)]
        for microbatch, handle in enumerate(arriving):
            with torch.cuda.stream(side):
                received = handle.result()
                tokens = stage.forward(received["hidden"], received["residual"])
                comm.broadcast(tokens.to(device), 1)
            said[microbatch].append(tokens.tolist())
    return said


def generate() -> list[list[list[int]]]:
    comm = connect()
    device = torch.device("cuda", torch.cuda.current_device())
    said = run_first(comm, device) if comm.rank == 0 else run_last(comm, device)
    comm.drain(20)
    comm.close()
    return said


def test_two_stages_generate_the_tokens_of_the_model(ranks: Ranks) -> None:
    assert ranks.run(generate, 2, timeout=90) == [expected()] * 2
