"""Errors as objects: what they carry, and that every kind is documented where they point."""

from __future__ import annotations

import copy
import pickle
import re
import traceback
from pathlib import Path

import pytest
import torch
from commlayer_testkit.local import Hub, connected

import commlayer
from commlayer import CommError, CommTimeout, ErrorKind, OperationRef

CLASSES = {
    ErrorKind.CONFIG: "ConfigError",
    ErrorKind.PLUGIN: "PluginError",
    ErrorKind.UNSUPPORTED: "UnsupportedError",
    ErrorKind.CLOSED: "Closed",
    ErrorKind.FULL: "Full",
    ErrorKind.TIMEOUT: "CommTimeout",
    ErrorKind.CANCELLED: "Cancelled",
    ErrorKind.PEER_LOST: "PeerLost",
    ErrorKind.DEVICE: "DeviceError",
    ErrorKind.PROTOCOL: "ProtocolError",
    ErrorKind.LIFETIME: "LifetimeError",
}
PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_every_kind_has_a_section_where_its_errors_point(kind: ErrorKind) -> None:
    page, _, anchor = CommError(kind, "x", "y", "z").anchor.partition("#")
    assert PAGE.parts[-2:] == Path(page).parts
    text = PAGE.read_text()
    assert len(re.findall(rf"^## {anchor}$", text, re.M)) == 1
    head, _, sections = text.partition("\n## ")
    assert f"`{anchor}`" in head, "it is in the table, too"
    assert re.search(rf"^(## )?{anchor}\n`{CLASSES[kind]}`", sections, re.M), "it names the class"


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_every_kind_has_a_class_of_its_own(kind: ErrorKind) -> None:
    cls = getattr(commlayer, CLASSES[kind])
    about = OperationRef("irecv from rank 3", "irecv", 3)
    by_kind, by_class = CommError(kind, about, "y", "z"), cls(about, "y", "z")
    twins = (by_kind.again(), pickle.loads(pickle.dumps(by_kind)), copy.copy(by_kind))
    for error in (by_kind, by_class, *twins):
        assert type(error) is cls
        assert (error.kind, error.about, error.peer) == (kind, about, 3)
        assert str(error) == "irecv from rank 3: y. z"
    others = [each for each in ErrorKind if each is not kind]
    assert not any(isinstance(by_kind, getattr(commlayer, CLASSES[each])) for each in others)


def test_no_section_is_about_nothing() -> None:
    sections = re.findall(r"^## (.*)$", PAGE.read_text(), re.M)
    assert sections == [kind.value for kind in ErrorKind]


def fields(error: CommError) -> tuple[object, ...]:
    return (
        error.call, error.peer, error.channel, error.tag, error.sequence, error.nbytes,
    )  # fmt: skip


def test_an_operation_s_error_carries_its_values() -> None:
    with connected() as (a, b):
        b.isend(torch.ones(3), 0, tag=5)
        receive = a.irecv(torch.ones(2), 1, tag=5)
        with pytest.raises(CommError) as caught:
            receive.wait(20)
        assert caught.value.kind is ErrorKind.PROTOCOL
        assert fields(caught.value) == ("irecv", 1, "data", "5", 0, None)
        send = b.isend(torch.ones(3), 0, tag=6)
        with pytest.raises(CommTimeout) as late:
            send.wait(0.01)
        call, peer, channel, tag, sequence, nbytes = fields(late.value)
        assert (call, peer, channel, tag, sequence) == ("isend", 0, "data", "6", 0)
        assert isinstance(nbytes, int)
        assert nbytes >= 12
        a.recv(None, 1, tag=6)


def test_an_error_about_a_peer_names_it() -> None:
    hub = Hub(3)
    with connected(hub=hub) as comms:
        receive = comms[0].irecv_object(1)
        hub.kill(1)
        with pytest.raises(CommError) as caught:
            receive.wait(20)
        assert caught.value.kind is ErrorKind.PEER_LOST
        assert fields(caught.value) == ("irecv_object", 1, "data", "objects", None, None)


def test_an_error_about_nothing_in_particular_has_no_values() -> None:
    assert fields(CommError(ErrorKind.CONFIG, "configuration", "x", "y")) == (None,) * 6


def test_values_survive_a_copy_and_a_pickle() -> None:
    with connected() as (a, _):
        with pytest.raises(CommError) as caught:
            a.irecv(torch.ones(2), 1, tag=7).wait(0)
        error = caught.value
    for twin in (error.again(), pickle.loads(pickle.dumps(error))):
        assert type(twin) is CommTimeout
        assert str(twin) == str(error)
        assert fields(twin) == fields(error) == ("irecv", 1, "data", "7", None, None)


def test_a_traceback_ends_with_the_anchor_and_the_text_does_not_have_it() -> None:
    error = CommTimeout("x", "y", "z")
    assert str(error) == "x: y. z"
    if hasattr(error, "add_note"):
        assert traceback.format_exception(error)[-1] == "see docs/errors.md#timeout\n"
