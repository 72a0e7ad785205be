"""Dumps of several ranks on one clock, and what is made of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from commlayer_tools.timeline import page
from commlayer_tools.trace import Trace, chrome, join, load
from ranks import here
from ranks.pool import Ranks

from commlayer import CommError, ErrorKind
from commlayer.observe import recorder
from commlayer.observe.recorder import SCHEMA, Blocked, Clock, Dump, Identity, Record

STEPS = 5


def a_pipeline(folder: str) -> None:
    comm = here.connect(trace_dir=folder, name="stages", record_sites=True)
    for step in range(STEPS):
        if comm.rank == 0:
            comm.send_tensor_dict({"hidden": torch.ones(1 << 14), "step": step}, 1)
        else:
            assert comm.recv_tensor_dict(0)["step"] == step
        comm.broadcast_object(step if comm.rank == 1 else None, 1)
    comm.close()


@pytest.fixture
def traced(ranks: Ranks, tmp_path: Path) -> Path:
    ranks.run(a_pipeline, 2, str(tmp_path))
    return tmp_path


def test_ranks_of_one_host_are_joined_by_message(traced: Path) -> None:
    ((name, dumps),) = load(traced).items()
    trace = join(name, dumps)
    assert name == "stages"
    assert [dump.who.rank for dump in trace.dumps] == [0, 1]
    assert set(trace.clocks) == {"same clock"}
    assert len(trace.entries) == 4 * STEPS
    assert len(trace.messages) == 2 * STEPS
    for source, target in trace.messages:
        assert source.record.sequence == target.record.sequence
        assert source.record.kind.endswith(("send_tensor_dict", "broadcast_object"))
        assert source.place.rank != target.place.rank
        assert 0 <= source.start <= target.end <= trace.duration
    assert trace.blocked
    assert not any(overlaps(trace))


def overlaps(trace: Trace) -> list[str]:
    """Rows in which two operations overlap."""
    rows: dict[object, list[tuple[float, float]]] = {}
    for entry in trace.entries:
        rows.setdefault(entry.place, []).append((entry.start, entry.end))
    return [
        str(place)
        for place, spans in rows.items()
        for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False)
        if start < end
    ]


def test_the_command_writes_both_files(traced: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    command = [sys.executable, "-m", "commlayer.cli", "trace", str(traced), "--out", str(out)]
    said = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    (result,) = json.loads(said.stdout)
    assert result["ranks"] == [0, 1]
    assert (result["operations"], result["messages"], result["pending"]) == (20, 10, 0)
    assert Path(result["trace"]).parent == out
    events = json.loads(Path(result["trace"]).read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    assert "<!doctype html>" in Path(result["timeline"]).read_text()
    plain = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "2 of 2 ranks, 20 operations, 10 messages" in plain.stdout


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "commlayer.cli", "trace", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.returncode == 1
    assert "no dump of a rank" in said.stderr
    assert "trace_dir" in said.stderr


def a_child_closes(folder: str) -> None:
    comm = here.connect(trace_dir=folder)
    child = os.fork()
    if child == 0:
        comm.close()
        os._exit(5)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 5
    assert not list(Path(folder).glob("*.json")), "the dump is the parent's to write"
    here.meet("the child has closed what it inherited")
    comm.close()


def test_a_forked_child_writes_no_dump(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(a_child_closes, 2, str(tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 2


def record(way: str, peer: int, number: int, posted: float, settled: float) -> Record:
    return Record(
        kind=f"i{way}",
        channel="data",
        tag="0",
        peer=peer,
        direction=way,
        sequence=number,
        nbytes=8,
        posted=posted,
        settled=settled,
        released=settled,
    )


def dump(
    rank: int,
    records: Sequence[Record],
    *,
    boot: str = "one",
    wall: float = 1000.0,
    open: Sequence[Record] = (),
    report: str = "",
) -> Dump:
    """A dump that ends at 50 s of its monotonic clock; `wall` is the wall clock at 0."""
    return Dump(
        SCHEMA,
        Identity("test", rank, 2, "local", f"host {boot}", boot, 1),
        "closed",
        (Clock(0.0, wall), Clock(50.0, wall + 50.0)),
        0,
        tuple(records),
        tuple(open),
        (Blocked("irecv", 1 - rank, 10.0, 11.0),),
        report,
    )


def test_hosts_are_placed_by_wall_clock() -> None:
    """Clocks that agree with the messages in one direction only: nothing to go by but them."""
    a = dump(0, [record("send", 1, 0, 10.0, 10.2)])
    b = dump(1, [record("recv", 0, 0, 5.0, 5.3)], boot="two", wall=1005.0)
    trace = join("test", [a, b])
    assert trace.clocks == ("same clock", "wall clock")
    ((source, target),) = trace.messages
    assert target.start - source.start == pytest.approx(0.0)
    assert target.end - source.start == pytest.approx(0.3)


@pytest.mark.parametrize("error", [0.0, 0.4, -0.4])
def test_wall_clocks_are_moved_to_fit_messages(error: float) -> None:
    """A message each way takes 0.1 s; the second host's wall clock is wrong by `error`."""
    a = dump(0, [record("send", 1, 0, 10.0, 10.1), record("recv", 1, 0, 10.5, 12.1)])
    b = dump(
        1,
        [record("recv", 0, 0, 4.0, 5.1), record("send", 0, 0, 7.0, 7.1)],
        boot="two",
        wall=1005.0 + error,
    )
    trace = join("test", [a, b])
    assert trace.clocks[1] == f"wall clock, moved {0.0 - 1e3 * error:+.3f} ms to fit messages"
    for source, target in trace.messages:
        assert target.end - source.start == pytest.approx(0.1)


def test_pending_operations_last_to_the_end_of_the_dump() -> None:
    pending = record("recv", 1, -1, 20.0, 0.0)
    trace = join("test", [dump(0, [record("send", 1, 0, 10.0, 10.1)], open=[pending])])
    (entry,) = [entry for entry in trace.entries if entry.open]
    assert entry.end - entry.start == pytest.approx(30.0)
    assert trace.messages == ()
    event = next(e for e in chrome(trace)["traceEvents"] if e.get("args", {}).get("pending"))
    assert event["dur"] == pytest.approx(30e6)


def test_operations_of_one_lane_that_overlap_get_rows_of_their_own() -> None:
    records = [record("send", 1, n, 10.0 + n, 12.5 + n) for n in range(6)]
    trace = join("test", [dump(0, records)])
    assert {entry.place.row for entry in trace.entries} == {0, 1, 2}
    assert not overlaps(trace)


def test_flows_of_the_chrome_trace_are_pairs() -> None:
    a = dump(0, [record("send", 1, 0, 10.0, 10.2)])
    b = dump(1, [record("recv", 0, 0, 9.0, 10.3)])
    events = chrome(join("test", [a, b]))["traceEvents"]
    start, finish = (next(e for e in events if e["ph"] == phase) for phase in "sf")
    assert (start["id"], start["pid"], finish["pid"]) == (finish["id"], 0, 1)
    assert finish["ts"] - start["ts"] == pytest.approx(0.3e6)
    for event in events:
        assert event["ph"] == "M" or event["ts"] >= 0


def test_the_page_has_no_resource_of_another_place_and_no_markup_of_the_data() -> None:
    text = page(join("test", [dump(0, [], report="<script>alert(1)</script>")]))
    assert not re.search(r"https?://|src=|@import|url\(", text)
    assert text.count("<script") == 2
    data = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert data is not None
    assert json.loads(data[1])["ranks"][0]["report"] == "<script>alert(1)</script>"


def test_connections_of_one_name_have_files_of_their_own(tmp_path: Path) -> None:
    names = [recorder.file_name("two words/…", rank=3) for _ in range(2)]
    assert names == ["two_words__.rank3.json", "two_words__.2.rank3.json"]
    for name in names:
        recorder.write(dump(0, []), tmp_path / name)
    assert sorted(load(tmp_path)) == ["two_words__", "two_words__.2"]


def test_a_file_of_another_schema_is_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "x.rank0.json").write_text('{"schema": 2}')
    with pytest.raises(CommError, match="schema 2") as caught:
        load(tmp_path)
    assert caught.value.kind is ErrorKind.CONFIG
