"""When the plugin installs, and the engines that it leaves alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from commlayer_vllm import plugin, seams
from stand_in import Engine, Group, Runner

from commlayer import CommError


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.delenv("COMMLAYER_VLLM", raising=False)
    return Engine(monkeypatch)


def test_it_is_silent_unless_asked_for(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    plugin.register()
    assert engine.state.initialize_model_parallel(size=3) == "made"
    assert engine.made == 3
    assert not vars(engine.group).keys() - vars(Group()).keys()
    assert not caplog.records


def test_registering_again_changes_nothing(engine: Engine) -> None:
    plugin.register()
    wrapped = engine.state.initialize_model_parallel
    plugin.register()
    assert engine.state.initialize_model_parallel is wrapped
    assert wrapped.__doc__ == "Make the groups."


def test_the_configuration_is_read_once_the_groups_are_made(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.commlayer")
    plugin.register()
    engine.config.additional_config = {"commlayer": {}}
    engine.group = Group(size=1)
    engine.state.initialize_model_parallel()
    assert "one pipeline stage, nothing to replace" in caplog.text


def test_wrong_settings_stop_the_engine(engine: Engine) -> None:
    plugin.register()
    engine.config.additional_config = {"commlayer": {"bakend": 1}}
    with pytest.raises(CommError, match="unknown key 'bakend'"):
        engine.state.initialize_model_parallel()


class OtherSignature(Group):
    def isend_tensor_dict(self, tensors: Any, rank: int) -> Any: ...  # type: ignore[override]

    recv_object: Any = None


def test_an_engine_with_other_calls_is_refused_and_left_as_it_is(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register()
    engine.config.additional_config = {"commlayer": {}}
    engine.group = OtherSignature()
    del engine.group.cpu_group
    engine.state.initialize_model_parallel()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    for part in (
        "is left as it is",
        "OtherSignature has no cpu_group",
        "OtherSignature.recv_object is missing",
        "OtherSignature.isend_tensor_dict takes (tensors, rank), known is (tensor_dict, dst, ",
    ):
        assert part in record.getMessage()
    assert "isend_tensor_dict" not in vars(engine.group)


def test_an_engine_that_makes_groups_otherwise_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del engine.state.initialize_model_parallel
    plugin.register()
    assert not caplog.records
    monkeypatch.setenv("COMMLAYER_VLLM", "1")
    plugin.register()
    assert "makes its groups in a way" in caplog.text


class OtherRunner(Runner):
    def _pp_broadcast_prev_sampled_token_ids(self, ids: Any) -> None: ...  # type: ignore[override]

    _pp_receive_prev_sampled_token_ids_to_input_batch: Any = property()


def test_runners_are_known_by_parameters_and_by_what_they_call(engine: Engine) -> None:
    assert seams.find_broadcasts() == [], "no runner, nothing to replace"
    engine.module("vllm.v1.worker.gpu_model_runner", GPUModelRunner=OtherRunner)
    with pytest.raises(seams.UnknownSeams) as caught:
        seams.find_broadcasts()
    assert caught.value.differences == [
        "GPUModelRunner._pp_broadcast_prev_sampled_token_ids takes (self, ids), known is "
        "(self, sampled_token_ids)",
        "GPUModelRunner._pp_receive_prev_sampled_token_ids_to_input_batch is a property, not a "
        "function",
    ]
    engine.module("vllm.v1.worker.gpu_model_runner", GPUModelRunner=Runner)
    with pytest.raises(seams.UnknownSeams, match=r"does not call torch\.distributed\.broadcast"):
        seams.find_broadcasts()
    engine.module("vllm.v1.worker.gpu_model_runner")
    with pytest.raises(seams.UnknownSeams, match="has no GPUModelRunner"):
        seams.find_broadcasts()


class Broadcasting:
    def _pp_broadcast_prev_sampled_token_ids(self, sampled_token_ids: Any) -> None:
        torch.distributed.broadcast(sampled_token_ids, src=0)

    def _pp_receive_prev_sampled_token_ids_to_input_batch(self) -> None:
        torch.distributed.broadcast(torch.empty(1), src=0, async_op=True)


def test_known_runners_are_found(engine: Engine) -> None:
    engine.module("vllm.v1.worker.gpu_model_runner", GPUModelRunner=Broadcasting)
    found = seams.find_broadcasts()
    assert [owner for owner, _ in found] == [Broadcasting, Broadcasting]
    assert [seam.channels for _, seam in found] == [("tokens",), ("tokens",)]


def test_a_worker_waits_if_it_keeps_its_sends(engine: Engine) -> None:
    class Waiting:
        _pp_send_work: list[Any]

        def execute_model(self) -> None:
            for handle in self._pp_send_work:
                handle.wait()

    class Forgetting:
        def execute_model(self) -> None: ...

    assert not seams.worker_waits(), "no worker is known here"
    for worker, waits in ((Waiting, True), (Forgetting, False)):
        engine.module("vllm.v1.worker.gpu_worker", Worker=worker)
        assert seams.worker_waits() is waits
