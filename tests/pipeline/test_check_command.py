"""``sim check`` and the files it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from commlayer_testkit.commands.check import check as command
from commlayer_testkit.schedule import check as schedule
from commlayer_testkit.schedule.files import read_schedules
from typer.testing import CliRunner

from commlayer.errors import CommError, ErrorKind
from commlayer.semantics import Order, Semantics

app = typer.Typer()
app.command()(command)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_the_virtual_pipeline() -> None:
    code, text = run("--one-channel", "--ranks", "2", "--batches", "2", "--transport", "hccl")
    assert code == 1
    assert text.startswith("can deadlock:\n  rank 0: send of chunk 0's output for batch 1")
    assert "passes with own channel" in text
    assert run()[0] == 0
    assert run("--one-channel", "--transport", "gloo")[0] == 0
    assert run("--headers", "blocking")[0] == 1
    assert run("--headers", "posted")[0] == 0
    assert run("--topology", "linear", "--ranks", "3")[0] == 0


def test_json() -> None:
    code, text = run("--one-channel", "--json")
    report = json.loads(text)
    assert code == 1
    assert report["ok"] is False
    assert [need["rank"] for need in report["cycle"]] == [0, 1, 1, 0]
    assert report["cycle"][0]["action"]["kind"] == "send"
    assert report["proposals"][0]["cure"] == "own channel"


CROSSED = """
[channels]
{channels}

[[ranks]]
calls = [
    {{ work = "first chunk" }},
    {{ send = 1, name = "up" }},
    {{ recv = 1, name = "down" }},
    {{ wait = "up" }},
]

[[ranks]]
calls = [{{ group = [{{ send = 0, name = "down" }}, {{ recv = 0, name = "up" }}] }}]
"""


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "crossed.toml"
    path.write_text(CROSSED.format(channels='"*" = "hccl"'))
    assert run(str(path))[0] == 0
    path.write_text(path.read_text().replace("{ group = [", "").replace("] }]", "]"))
    code, text = run(str(path))
    assert code == 1
    assert "rank 1: down (send, channel data)" in text


def test_every_call_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    calls = [
        {"send": 1, "name": "s", "channel": "fold", "tag": 3, "nbytes": 8, "blocking": True},
        {"recv": 1, "stream": "side"},
        {"broadcast": 0, "name": "b"},
        {"wait": "b", "stream": "side"},
        {"synchronize": "side"},
        {"follow": "side", "after": "main"},
        {"work": "w"},
        {"group": [{"send": 1}, {"recv": 1}]},
    ]
    facts = {"p2p": {"order": "per_tag"}, "tags": True}
    path.write_text(json.dumps({"channels": {"a": "x", "b": facts}, "ranks": [{"calls": calls}]}))
    (read,), of = read_schedules(path, {"x": Semantics()}.__getitem__)
    assert list(read) == [
        schedule.send(1, "s", channel="fold", tag=3, nbytes=8, blocking=True),
        schedule.recv(1, stream="side"),
        schedule.broadcast(0, "b", channel="data"),
        schedule.wait("b", stream="side"),
        schedule.synchronize("side"),
        schedule.follow("side", "main"),
        schedule.work("w"),
        (schedule.send(1), schedule.recv(1)),
    ]
    assert isinstance(of, dict)
    assert of["a"] == Semantics()
    assert of["b"].p2p.order is Order.PER_TAG


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ranks = 3\n[channels]", "ranks"),
        ("not toml", "bad.toml"),
        ('ranks = [{ calls = [{ send = 1, wait = "x" }] }]\n[channels]', "a call is one of"),
        ("ranks = [{ calls = [{ sned = 1 }] }]\n[channels]", "sned"),
    ],
)
def test_a_file_that_says_something_else(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(CommError, match=words) as error:
        read_schedules(path, {}.__getitem__)
    assert error.value.kind is ErrorKind.CONFIG
    with pytest.raises(CommError, match="readable"):
        read_schedules(tmp_path / "absent.toml", {}.__getitem__)


def test_a_schedule_that_cannot_be_called(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('[channels]\n"*" = "gloo"\n[[ranks]]\ncalls = [{ send = 1 }]')
    code, text = run(str(path))
    assert code == 2
    assert "rank 1 is not one of 1" in text
