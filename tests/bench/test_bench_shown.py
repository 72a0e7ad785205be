"""How results are compared, tabulated, drawn and put on the page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from commlayer_bench.compare import Lookup, ratio
from commlayer_bench.contenders import CONTENDERS
from commlayer_bench.machine import this_machine
from commlayer_bench.payloads import size_text
from commlayer_bench.plots import COLOURS, PICTURES, draw
from commlayer_bench.records import SCHEMA, Absent, Results, Row, decode
from commlayer_bench.tables import Cell, number, scale, tables
from commlayer_bench.workload import Scale
from commlayer_bench.workloads import WORKLOADS
from commlayer_bench.workloads.observing import OFF, ON
from msgspec.structs import replace as replaced
from typer.testing import CliRunner

from commlayer.cli import build

DOCS = Path(__file__).parents[2] / "docs"


def row(contender: str, *samples: float, metric: str = "latency", unit: str = "s") -> Row:
    return Row(
        workload="dict", case="2 × 1 KiB", x=2048, contender=contender, metric=metric, unit=unit,
        samples=samples,
    )  # fmt: skip


def results(*rows: Row) -> Results:
    return Results(
        schema=SCHEMA, date="2026-01-01", rounds=3, scale="tiny", load=3.0, machine=this_machine(),
        rows=rows, absent=(Absent("vllm", "vllm is not installed"),),
    )  # fmt: skip


@pytest.fixture
def everything() -> Results:
    """A row for every case, metric and contender."""
    rows = [
        Row(
            workload=name, case=case.label, x=case.x, contender=contender, metric=metric,
            unit=unit, samples=(1e-4 * (1 + i), 2e-4, 3e-4),
        )
        for name, workload in WORKLOADS.items()
        for ranks in workload.worlds(Scale.full)
        for case in workload.cases(Scale.full, ranks)
        for i, contender in enumerate([OFF, ON] if name == "observing" else CONTENDERS)
        for metric, unit in workload.metrics.items()
    ]  # fmt: skip
    return results(*rows)


def test_ratio_is_of_medians_and_its_spread_of_rounds():
    found = ratio(row("common", 2, 4, 8), row("plain", 1, 4, 2))
    assert found.value == 2
    assert (found.low, found.high) == (1.5, 3)


def test_lookup_of_what_was_not_measured_is_none():
    lookup = Lookup(results(row("plain", 1, 2, 3)))
    assert lookup.ratio("dict", "2 × 1 KiB", "latency", "commlayer", "plain") is None
    assert lookup.get("dict", "2 × 1 KiB", "latency", "plain") is not None


def test_quartiles_of_one_sample_are_the_sample():
    assert row("plain", 5).quartiles == (5, 5)


def test_results_of_another_schema_are_refused():
    with pytest.raises(ValueError, match=f"schema {SCHEMA + 1}"):
        decode(replaced(results(), schema=SCHEMA + 1).encode())


def test_table_has_median_quartiles_and_ratio():
    (table,) = tables(results(row("common", 4e-4, 4e-4, 4e-4), row("plain", 1e-4, 2e-4, 3e-4)))
    assert table.columns == ("plain", "common")
    assert table.lines == (
        ("2 × 1 KiB", (Cell("200 µs", "150–250"), Cell("400 µs", "400–400", "2.00", False))),
    )


def test_more_throughput_is_better():
    rows = (
        row("plain", 1e9, metric="throughput", unit="B/s"),
        row("common", 2e9, metric="throughput", unit="B/s"),
    )
    (table,) = tables(results(*rows))
    assert table.lines[0][1][1] == Cell("2 GB/s", "2–2", "2.00", True)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.0123, "s", "12.3 ms"), (4.2e-6, "s", "4.2 µs"), (0.0, "s", "0 µs"), (3.0, "", "3 ")],
)
def test_numbers_read_well(value, unit, text):
    factor, name = scale(value, unit)
    assert f"{number(value / factor)} {name}" == text


def test_sizes_read_well():
    assert [size_text(n) for n in (64, 1024, 1 << 20, 3 << 19)] == [
        "64 B", "1 KiB", "1 MiB", "1.5 MiB",
    ]  # fmt: skip


def test_the_machine_is_described_without_its_name():
    import socket

    assert this_machine().cores >= 1
    assert this_machine().versions["torch"]
    assert socket.gethostname() not in str(this_machine())


def test_every_picture_is_drawn(everything, tmp_path):
    files = list(draw(everything, tmp_path))
    assert {file.stem for file in files} == set(PICTURES)
    for file in files:
        assert ElementTree.parse(file).getroot().tag.endswith("svg")


def test_pictures_are_the_same_for_the_same_results(everything, tmp_path):
    first, second = (list(draw(everything, tmp_path / name)) for name in "ab")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_nothing_is_drawn_of_nothing(tmp_path):
    assert list(draw(results(), tmp_path)) == []


def test_every_contender_has_a_colour():
    assert set(COLOURS) == set(CONTENDERS)


def test_results_are_shown_from_a_file(tmp_path):
    file = tmp_path / "results.json"
    file.write_bytes(results(row("plain", 1e-4, 2e-4, 3e-4)).encode())
    shown = CliRunner().invoke(build(), ["bench", "--show", str(file), "--plots", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "200 µs" in shown.output
    assert "vllm is not installed" in shown.output
    assert "busy machine" in shown.output
    assert (tmp_path / "latency.svg").exists()


@pytest.mark.parametrize("option", ["--workload", "--contender"])
def test_unknown_names_are_refused(option):
    refused = CliRunner().invoke(build(), ["bench", option, "nonsense"])
    assert refused.exit_code == 2
    assert "nonsense" in refused.output


def test_a_file_that_holds_no_results_is_refused(tmp_path):
    file = tmp_path / "results.json"
    file.write_text("{}")
    assert CliRunner().invoke(build(), ["bench", "--show", str(file)]).exit_code == 2


def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_page", DOCS / "performance" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_its_results():
    page = (DOCS / "performance.md").read_text("utf-8")
    recorded = decode((DOCS / "performance" / "results.json").read_bytes())
    assert make().render(page, recorded) == page


def test_every_aim_is_of_something_measured(everything):
    module = make()
    lookup = Lookup(everything)
    for aim in module.AIMS:
        assert lookup.get(aim.workload, aim.case, aim.metric, "commlayer") is not None
    lines = module.aims(everything).splitlines()
    assert len(lines) == 2 + 2 * (len(module.AIMS) + 4)


def test_a_page_without_its_blocks_is_refused():
    with pytest.raises(ValueError, match="block"):
        make().render("# Performance\n", results())
