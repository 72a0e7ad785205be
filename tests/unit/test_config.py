"""CommConfig: precedence of its sources, and what invalid input gets."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> str:
        path = tmp_path / "settings.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def refused(mapping=None, environ=None) -> CommError:
    with pytest.raises(CommError) as caught:
        CommConfig.load(mapping, environ=environ or {})
    assert caught.value.kind is ErrorKind.CONFIG
    assert caught.value.cure
    return caught.value


def test_defaults_without_any_source():
    assert CommConfig.load(environ={}) == CommConfig()


def test_mapping_beats_environment_beats_file_beats_default(write):
    path = write("max_inflight_ops = 2\nmax_items = 2\nmax_depth = 2\n")
    environ = {
        "COMMLAYER_MAX_INFLIGHT_OPS": "1",
        "COMMLAYER_MAX_ITEMS": "1",
    }
    config, sources = CommConfig.load_with_sources(
        {"config": path, "max_inflight_ops": 3}, environ=environ
    )
    assert (config.max_inflight_ops, config.max_items, config.max_depth) == (3, 1, 2)
    assert sources == {
        "max_inflight_ops": "mapping",
        "max_items": "environment",
        "max_depth": f"file {path}",
    }
    assert config.unclaimed_messages == CommConfig().unclaimed_messages


def test_file_is_found_through_the_environment_and_may_use_a_table(write):
    path = write('[commlayer]\nname = "a"\n[commlayer.options]\nx = 1\n[other]\ny = 2\n')
    config = CommConfig.load(environ={"COMMLAYER_CONFIG": path})
    assert (config.name, config.options) == ("a", {"x": 1})


def test_file_of_the_mapping_beats_that_of_the_environment(write):
    path = write('name = "mapping"')
    environ = {"COMMLAYER_CONFIG": "/nonexistent.toml"}
    assert CommConfig.load({"config": path}, environ=environ).name == "mapping"


def test_process_environment_is_the_default_source(monkeypatch):
    monkeypatch.setenv("COMMLAYER_NAME", "from-process")
    assert CommConfig.load().name == "from-process"


def test_environment_carries_lists_tables_numbers_and_booleans():
    config = CommConfig.load(
        environ={
            "COMMLAYER_CHANNELS": "kv, draft,",
            "COMMLAYER_OPTIONS": '{"interface": "lo", "depth": 2}',
            "COMMLAYER_CONNECT_TIMEOUT": "1.5",
            "COMMLAYER_MAX_DEPTH": "7",
            "COMMLAYER_ALLOW_PICKLE": "true",
            "COMMLAYER_NAME": "123",
            "PATH": "/bin",
        }
    )
    assert config.channels == ("kv", "draft")
    assert config.options == {"interface": "lo", "depth": 2}
    assert config.connect_timeout == 1.5
    assert config.max_depth == 7
    assert config.allow_pickle is True
    assert config.name == "123"


@pytest.mark.parametrize(
    ("key", "near"), [("max_inflight_op", "max_inflight_ops"), ("BACKEND", "backend")]
)
def test_unknown_key_of_the_mapping_names_the_near_miss(key, near):
    error = refused({key: 1})
    assert repr(key) in error.cause
    assert repr(near) in error.cure
    assert "mapping" in error.operation


def test_unknown_key_of_the_file_names_file_and_near_miss(write):
    path = write("conect_timeout = 1.0")
    error = refused({"config": path})
    assert path in error.operation
    assert "'connect_timeout'" in error.cure


@pytest.mark.parametrize("variable", ["COMMLAYER_BACKENDS", "COMMLAYER_backend"])
def test_unknown_variable_names_the_near_miss(variable):
    error = refused(environ={variable: "x"})
    assert variable in error.cause
    assert "'COMMLAYER_BACKEND'" in error.cure


@pytest.mark.parametrize(
    "suffix",
    [
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP",
        "PORT",
        "PORT_29500_TCP",
        "PORT_29500_TCP_ADDR",
        "PORT_29500_TCP_PORT",
        "PORT_29500_TCP_PROTO",
        "PORT_53_UDP",
        "API_SERVICE_HOST",
        "API_PORT",
        "API_PORT_80_TCP_ADDR",
    ],
)
def test_what_a_container_platform_sets_for_a_service_is_passed_over(suffix):
    assert CommConfig.load(environ={f"COMMLAYER_{suffix}": "tcp://10.0.0.1:80"}) == CommConfig()


@pytest.mark.parametrize("suffix", ["SERVICE", "HOST", "PORTS", "REPORT_SIGNALS", "SERVICE_NAME"])
def test_what_only_looks_like_it_is_unknown(suffix):
    assert "unknown key" in refused(environ={f"COMMLAYER_{suffix}": "x"}).cause


def test_unknown_key_without_a_near_miss_lists_the_known_ones():
    assert "max_inflight_bytes" in refused({"zzz": 1}).cure
    assert "max_inflight_bytes" in refused({5: 1}).cure


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("backend", ""),
        ("backend", None),
        ("max_inflight_ops", 0),
        ("max_inflight_ops", True),
        ("max_inflight_ops", 2.5),
        ("max_inflight_ops", "3"),
        ("max_header_bytes", 1),
        ("max_depth", 100_000),
        ("connect_timeout", 0),
        ("connect_timeout", -1.0),
        ("connect_timeout", math.nan),
        ("connect_timeout", math.inf),
        ("close_timeout", math.nan),
        ("full_timeout", math.inf),
        ("on_full", "drop"),
        ("allow_pickle", 1),
        ("channels", "kv"),
        ("channels", ["kv", "kv"]),
        ("channels", {"kv": {"may_idl": True}}),
        ("channels", {"kv": {"may_idle": 3}}),
        ("channels", {" kv": {}}),
        ("channels", ["kv", ""]),
        ("channels", [" kv"]),
        ("channels", [f"c{n}" for n in range(1001)]),
        ("options", []),
        ("options", {1: 2}),
    ],
)
def test_wrong_types_and_ranges_are_refused_by_key(key, value):
    assert key in refused({key: value}).cause
    with pytest.raises(ValueError, match=key):
        CommConfig(**{key: value})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("COMMLAYER_MAX_INFLIGHT_OPS", "many"),
        ("COMMLAYER_MAX_INFLIGHT_OPS", "0"),
        ("COMMLAYER_CONNECT_TIMEOUT", "nan"),
        ("COMMLAYER_CONNECT_TIMEOUT", "inf"),
        ("COMMLAYER_ALLOW_PICKLE", "perhaps"),
        ("COMMLAYER_ON_FULL", "drop"),
        ("COMMLAYER_OPTIONS", "{interface"),
        ("COMMLAYER_OPTIONS", "[1]"),
    ],
)
def test_wrong_values_in_the_environment_are_refused_by_name(variable, text):
    error = refused(environ={variable: text})
    assert variable in error.operation or variable.removeprefix("COMMLAYER_").lower() in error.cause


def test_wrong_value_in_the_file_names_file_and_key(write):
    path = write("connect_timeout = nan")
    error = refused({"config": path})
    assert path in error.operation
    assert "connect_timeout" in error.cause


@pytest.mark.parametrize("text", ["a = = b", b"\xff\xfe", "commlayer = 3"])
def test_invalid_file_is_named(write, text):
    path = write(text)
    assert path in refused({"config": path}).operation


def test_unreadable_file_is_named(tmp_path):
    missing = tmp_path / "missing.toml"
    assert str(missing) in refused({"config": missing}).operation
    assert str(missing) in refused(environ={"COMMLAYER_CONFIG": str(missing)}).operation
    assert str(tmp_path) in refused({"config": tmp_path}).operation
    assert "5" in refused({"config": 5}).cause


@pytest.mark.parametrize("source", ["auto", ["backend"], 3])
def test_something_that_is_no_mapping_is_refused(source):
    assert type(source).__name__ in refused(source).cause


def test_the_callers_mapping_is_left_alone(write):
    mapping = {"config": write('name = "a"')}
    CommConfig.load(mapping, environ={})
    assert list(mapping) == ["config"]


def test_altered_copies_are_checked_too():
    assert msgspec.structs.replace(CommConfig(), max_items=5).max_items == 5
    with pytest.raises(ValueError, match="max_items"):
        msgspec.structs.replace(CommConfig(), max_items=0)


def test_the_documented_table_is_the_generated_one():
    from commlayer_tools.commands.config import render_markdown

    documented = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert documented.read_text() == render_markdown(), (
        "run: commlayer config --markdown > docs/configuration.md"
    )


def test_channels_with_settings() -> None:
    table = {"channels": {"kv": {}, "requests": {"may_idle": True}}}
    environ = {"COMMLAYER_CHANNELS": '{"kv": {}, "requests": {"may_idle": true}}'}
    for config in (
        CommConfig.load(table, environ={}),
        CommConfig.load(environ=environ),
        CommConfig(**table),  # type: ignore[arg-type]
    ):
        assert list(config.channels) == ["kv", "requests"]
        assert config.idle_channels == {"requests"}
        more = config.with_channels(["kv", "draft"])
        assert list(more.channels) == ["kv", "requests", "draft"]
        assert more.idle_channels == {"requests"}
    assert CommConfig(channels=("kv",)).with_channels(["draft"]).channels == ("kv", "draft")
    assert CommConfig(channels=("kv",)).idle_channels == frozenset()
