"""What the user says, and what the plugin makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from commlayer_vllm.settings import CHANNELS, requested, settings_of

from commlayer import CommError, ErrorKind


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [
        ({}, None, None),
        (None, None, None),
        (object(), None, None),
        ({}, "", None),
        ({}, "0", None),
        ({}, "off", None),
        ({}, "1", {}),
        ({}, "true", {}),
        ({"commlayer": {}}, None, {}),
        ({"commlayer": True}, "0", {}),
        ({"commlayer": False}, "1", None),
        ({"commlayer": {"backend": "gloo"}}, None, {"backend": "gloo"}),
        ({"other": 1}, None, None),
    ],
)
def test_it_is_asked_for_by_the_engines_configuration_or_by_the_variable(
    given: Any, variable: str | None, expected: dict[str, Any] | None
) -> None:
    environ = {} if variable is None else {"COMMLAYER_VLLM": variable}
    assert requested(given, environ) == expected


def test_a_value_that_is_no_table_is_refused() -> None:
    with pytest.raises(CommError, match=r'additional_config\["commlayer"\].*a table') as caught:
        requested({"commlayer": "gloo"}, {})
    assert caught.value.kind is ErrorKind.CONFIG


@pytest.mark.parametrize(
    ("platform", "backend"),
    [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "oneccl"), ("npu", "npu")],
)
def test_the_backend_follows_the_platform(platform: str, backend: str) -> None:
    assert settings_of({}, platform, environ={}).config.backend == backend


def test_a_configured_backend_goes_before_the_platforms() -> None:
    assert settings_of({"backend": "mpi"}, "cuda", environ={}).config.backend == "mpi"
    environ = {"COMMLAYER_BACKEND": "mpi", "COMMLAYER_VLLM": "1"}
    assert settings_of({}, "cuda", environ=environ).config.backend == "mpi"
    assert settings_of({"backend": "gloo"}, "cuda", environ=environ).config.backend == "gloo"


def test_an_unknown_platform_needs_a_backend() -> None:
    with pytest.raises(CommError, match="platform 'tpu'"):
        settings_of({}, "tpu", environ={})
    assert settings_of({"backend": "gloo"}, "tpu", environ={}).config.backend == "gloo"


def test_other_keys_are_those_of_the_library() -> None:
    settings = settings_of({"full_timeout": 5.0, "channels": ["kv"]}, "cpu", environ={})
    assert settings.config.full_timeout == 5.0
    assert settings.config.channels == ("kv", *CHANNELS)
    with pytest.raises(CommError, match=r"unknown key 'bakend'.*'backend'"):
        settings_of({"bakend": "gloo"}, "cpu", environ={})


def test_the_engines_format_needs_pickle_to_be_allowed() -> None:
    with pytest.raises(CommError, match="allow_pickle = true"):
        settings_of({"wire_format": "vllm"}, "cpu", environ={})
    table = {"wire_format": "vllm", "allow_pickle": True}
    assert settings_of(table, "cpu", environ={}).wire_format == "vllm"
    with pytest.raises(CommError, match="wire_format is 'pickle'"):
        settings_of({"wire_format": "pickle"}, "cpu", environ={})
