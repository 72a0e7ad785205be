"""The plugins' own code, on the simulated device in place of the vendor's."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import commlayer_gloo
import commlayer_nccl
import commlayer_npu
import commlayer_oneccl
import msgspec
import pytest
import torch
import torch.distributed as dist
from commlayer_testkit.sim import Scenario, explore
from commlayer_testkit.sim.mount_core import NoStore
from commlayer_testkit.sim.mount_device import SimDeviceRuntime, SimGroup
from commlayer_testkit.sim.profiles import GLOO, PROFILES
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.scenarios.device_core import NBYTES, churn, use
from commlayer_testkit.sim.transport import SimBackend
from commlayer_testkit.sim.world import World
from typer.testing import CliRunner

from commlayer.backend import World as BackendWorld
from commlayer.bootstrap.connector import connect_world
from commlayer.cli import build
from commlayer.config import CommConfig
from commlayer.device.backend import StreamBackend
from commlayer.errors import CommError, ErrorKind
from commlayer.loading import LoadedBackend
from commlayer.registry import Registry, default_registry
from commlayer.semantics import OperationSemantics, Poll, Semantics, WaitBlocks


class Named(NamedTuple):
    """A ``PrefixStore`` whose name can be read."""

    name: str
    store: Any


class Vendor:
    """What the vendor's modules do, on the device of whichever rank calls."""

    def __init__(self, profile: str) -> None:
        self.profile = PROFILES[profile]
        self.world: World
        self.timeouts: list[timedelta] = []
        self.device_kinds: list[tuple[str, int]] = []

    def rank(self) -> Rank:
        task = self.world.running
        assert task is not None
        return self.world.ranks[task.rank]

    def runtime(self, kind: str, index: int) -> SimDeviceRuntime:
        self.device_kinds.append((kind, index))
        return SimDeviceRuntime(self.rank())

    def group(self, store: Named, rank: int, size: int, timeout: timedelta) -> SimGroup:
        assert size == 2
        self.timeouts.append(timeout)
        low, high = map(int, store.name.rsplit("/", 1)[1].split("-"))
        assert (low, high)[rank] == self.rank().index
        return SimGroup(self.rank().endpoint(store.name, on=self.profile), (low, high))

    def process_group(self) -> Any:
        """A class with the constructor of c10d's device groups."""
        vendor = self

        class ProcessGroup:
            class Options:
                _timeout = timedelta()

                def __init__(self) -> None:
                    self.config = SimpleNamespace()  # NCCL's own

            def __new__(cls, store: Named, rank: int, size: int, options: Options) -> Any:
                return vendor.group(store, rank, size, options._timeout)

        return ProcessGroup


def module(patch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """Install a module of this name for the length of the test."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(contents)
    patch.setitem(sys.modules, name, made)
    return made


def nccl(patch: pytest.MonkeyPatch, vendor: Vendor) -> StreamBackend:
    patch.setattr(dist, "is_nccl_available", lambda: True)
    patch.setattr(dist, "ProcessGroupNCCL", vendor.process_group(), raising=False)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    patch.setattr(torch.cuda, "current_device", lambda: 1)
    patch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    return prepared(patch, commlayer_nccl, vendor)


def xccl(patch: pytest.MonkeyPatch, vendor: Vendor) -> StreamBackend:
    patch.setattr(dist, "is_xccl_available", lambda: True)
    patch.setattr(dist, "ProcessGroupXCCL", vendor.process_group(), raising=False)
    xpu(patch)
    return prepared(patch, commlayer_oneccl, vendor)


def bindings(patch: pytest.MonkeyPatch, vendor: Vendor) -> StreamBackend:
    module(patch, "intel_extension_for_pytorch")
    module(patch, "oneccl_bindings_for_pytorch")
    plugin = SimpleNamespace(creator_fn=vendor.group)
    patch.setitem(dist.Backend._plugins, "CCL", plugin)  # type: ignore[arg-type]
    xpu(patch)
    # Turns are taken between processes, by threads; test_turns.py plays those.
    patch.setattr(commlayer_oneccl, "TurnGroup", lambda group, store, rank: group)
    return prepared(patch, commlayer_oneccl, vendor)


def xpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.xpu, "is_available", lambda: True)
    patch.setattr(torch.xpu, "device_count", lambda: 2)
    patch.setattr(torch.xpu, "current_device", lambda: 1)


def npu(patch: pytest.MonkeyPatch, vendor: Vendor) -> StreamBackend:
    here = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, current_device=lambda: 1
    )
    module(patch, "torch_npu", npu=here, __version__="2.8.0")
    module(patch, "torch_npu._C")
    module(patch, "torch_npu._C._distributed_c10d", ProcessGroupHCCL=vendor.process_group())
    return prepared(patch, commlayer_npu, vendor)


def prepared(patch: pytest.MonkeyPatch, plugin: ModuleType, vendor: Vendor) -> StreamBackend:
    device = "CudaDevice" if plugin is commlayer_nccl else "TorchDevice"
    patch.setattr(plugin, device, vendor.runtime)
    patch.setattr(plugin, "PrefixStore", Named)
    backend = plugin.commlayer_backend()
    assert isinstance(backend, StreamBackend)
    return backend


Make = Callable[[pytest.MonkeyPatch, Vendor], StreamBackend]
PLUGINS = [
    pytest.param(nccl, "nccl", "cuda", id="nccl"),
    pytest.param(xccl, "xccl", "xpu", id="oneccl"),
    pytest.param(bindings, "ccl_bindings", "xpu", id="oneccl-bindings"),
    pytest.param(npu, "hccl", "npu", id="npu"),
]


class _Host(SimBackend):
    name = "gloo"


def exchange(vendor: Vendor, backend: StreamBackend) -> Scenario:
    """Two messages each way on two lanes, sources dropped at once."""

    def setup(world: World) -> None:
        vendor.world = world

        def body(rank: Rank) -> None:
            registry = Registry(())
            registry.add_backend(_Host(world, GLOO))
            comm = connect_world(
                BackendWorld(rank.index, 2, NoStore(), 60.0),
                LoadedBackend(backend, "test", ""),
                CommConfig(),
                registry=registry,
                runtime=rank.runtime,
            )
            peer = 1 - rank.index
            target = rank.arena.empty(NBYTES)
            receive = comm.irecv(target, peer, tag=3)
            comm.isend(rank.arena.full(rank.index, NBYTES), peer, tag=3)
            for value in (1, 2):
                comm.isend_tensor_dict({"x": rank.arena.full(value, NBYTES), "n": value}, peer)
                churn(rank)
            for value in (1, 2):
                got = comm.recv_tensor_dict(peer)
                assert got["n"] == value
                use(rank, got["x"], value)
            receive.wait()
            use(rank, target, peer)
            comm.close()

        world.start(2, body)

    return Scenario("plugin_exchange", setup, None, (vendor.profile.name,))


@pytest.mark.parametrize(("make", "profile", "kind"), PLUGINS)
def test_the_whole_plugin_runs_on_the_simulated_device(
    monkeypatch: pytest.MonkeyPatch, make: Make, profile: str, kind: str
) -> None:
    vendor = Vendor(profile)
    backend = make(monkeypatch, vendor)
    viability = backend.viability()
    assert viability.ok, viability
    assert backend.versions()["torch"] == str(torch.__version__)
    report = explore(
        exchange(vendor, backend), on=profile, strategy="random", budget=20, verify_every=0
    )
    assert report.failure is None, str(report)
    assert set(vendor.device_kinds) == {(kind, 1)}
    assert set(vendor.timeouts) == {timedelta(days=24)}


@pytest.mark.parametrize(("make", "profile", "kind"), PLUGINS)
def test_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, make: Make, profile: str, kind: str
) -> None:
    backend = make(monkeypatch, Vendor(profile))
    with pytest.raises(CommError, match="unknown colour") as caught:
        backend.open(BackendWorld(0, 2, NoStore(), 60.0), {"colour": 1})
    assert caught.value.kind is ErrorKind.CONFIG


# -- facts --------------------------------------------------------------------------------

FACTS = [
    pytest.param(commlayer_nccl.SEMANTICS, "nccl", id="nccl"),
    pytest.param(commlayer_oneccl.XCCL_SEMANTICS, "xccl", id="oneccl"),
    pytest.param(commlayer_oneccl.BINDINGS_SEMANTICS, "ccl_bindings", id="oneccl-bindings"),
    pytest.param(commlayer_npu.SEMANTICS, "hccl", id="npu"),
    pytest.param(
        commlayer_gloo.SEMANTICS,
        "gloo"
        if commlayer_gloo.SEMANTICS.p2p.poll is Poll.NEVER_BEFORE_WAIT
        else "gloo_early_poll",
        id="gloo",
    ),
]


@pytest.mark.parametrize(("semantics", "profile"), FACTS)
def test_the_simulator_plays_the_declared_facts(semantics: Semantics, profile: str) -> None:
    assert PROFILES[profile].semantics.facts() == semantics.facts()


@pytest.mark.parametrize(
    ("sources", "semantics"),
    [
        (commlayer_nccl.SOURCES, commlayer_nccl.SEMANTICS),
        (commlayer_oneccl.XCCL_SOURCES, commlayer_oneccl.XCCL_SEMANTICS),
        (commlayer_oneccl.BINDINGS_SOURCES, commlayer_oneccl.BINDINGS_SEMANTICS),
        (commlayer_npu.SOURCES, commlayer_npu.SEMANTICS),
        (commlayer_gloo.SOURCES, commlayer_gloo.SEMANTICS),
    ],
    ids=["nccl", "oneccl", "oneccl-bindings", "npu", "gloo"],
)
def test_every_claim_of_a_fact_has_a_source(sources: dict[str, str], semantics: Semantics) -> None:
    operation = OperationSemantics.__struct_fields__
    known = {f"{kind}.{fact}" for kind in ("p2p", "collective") for fact in operation}
    assert set(sources) <= known | set(Semantics.__struct_fields__)
    weakest = OperationSemantics()
    claimed = {
        f"p2p.{fact}"
        for fact in operation
        if getattr(semantics.p2p, fact) != getattr(weakest, fact)
    }
    # Gloo's are measured facts; what streams do with a host limit follows from their order.
    follows = {"p2p.max_outstanding_per_pair", "p2p.post_may_block"}
    assert claimed - follows <= set(sources)


def test_oneccl_declares_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = commlayer_oneccl.commlayer_backend()
    assert weak.semantics.p2p.poll is Poll.BLOCKS
    assert weak.semantics.p2p.wait_blocks is WaitBlocks.HOST
    monkeypatch.setattr(dist, "is_xccl_available", lambda: True)
    strong = commlayer_oneccl.commlayer_backend()
    assert strong.semantics.p2p.poll is Poll.EXACT
    assert strong.sources != weak.sources


@pytest.mark.parametrize(
    ("make", "profile", "variable"),
    [
        (nccl, "nccl", "NCCL_BLOCKING_WAIT"),
        (xccl, "xccl", "XCCL_BLOCKING_WAIT"),
        (npu, "hccl", "HCCL_BLOCKING_WAIT"),
    ],
)
@pytest.mark.parametrize(
    ("older", "newer", "refused"),
    [
        (None, "1", "TORCH_"),
        (None, "True", "TORCH_"),
        ("1", None, ""),
        ("0", "1", "TORCH_"),
        ("1", "0", None),
        ("n", None, None),
        (None, None, None),
    ],
)
def test_a_wait_that_blocks_the_host_is_refused_with_its_cure(
    monkeypatch: pytest.MonkeyPatch,
    make: Make,
    profile: str,
    variable: str,
    older: str | None,
    newer: str | None,
    refused: str | None,
) -> None:
    """The newer name of the variable counts where both are set, as in c10d."""
    backend = make(monkeypatch, Vendor(profile))
    monkeypatch.setattr(type(backend), "device", lambda self: None)
    for name, value in ((variable, older), (f"TORCH_{variable}", newer)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    world = BackendWorld(0, 2, NoStore(), 60.0)
    if refused is None:
        backend.open(world, {})
        return
    with pytest.raises(CommError, match=f"Unset {refused}{variable} for") as caught:
        backend.open(world, {})
    assert caught.value.kind is ErrorKind.CONFIG


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "here 1836 s"), ("600", "here 600 s"), ("0", "HCCL_EXEC_TIMEOUT=0 lets it stay")],
)
def test_npu_names_the_limit_of_hccl(
    monkeypatch: pytest.MonkeyPatch, seconds: str | None, said: str
) -> None:
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT", raising=False)
    if seconds is not None:
        monkeypatch.setenv("HCCL_EXEC_TIMEOUT", seconds)
    try:
        assert said in importlib.reload(commlayer_npu).SOURCES["p2p.completion"]
    finally:
        monkeypatch.undo()
        importlib.reload(commlayer_npu)


def test_npu_groups_are_not_the_global_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group without ranks becomes the parent of the application's own groups."""
    made: list[Any] = []
    backend = npu(monkeypatch, Vendor("hccl"))
    groups = sys.modules["torch_npu._C._distributed_c10d"]

    class ProcessGroup(groups.ProcessGroupHCCL):  # type: ignore[misc, name-defined]
        def __new__(cls, store: Named, rank: int, size: int, options: Any) -> Any:
            made.append(options)

    monkeypatch.setattr(groups, "ProcessGroupHCCL", ProcessGroup)
    backend.group("npu/data/0/up/2-5", NoStore(), 1, timedelta(days=24))
    (options,) = made
    assert options.global_ranks_in_group == [2, 5]
    assert options.group_id == "npu/data/0/up/2-5"


# -- this machine, and others ----------------------------------------------------------------


@pytest.fixture
def no_device() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has a device")


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    ("name", "reason", "install"),
    [
        pytest.param(
            "nccl",
            "without NCCL",
            "CUDA or ROCm build of torch",
            marks=pytest.mark.skipif(dist.is_nccl_available(), reason="torch is built with NCCL"),
        ),
        ("oneccl", "oneccl_bindings_for_pytorch is missing", "commlayer-oneccl[bindings]"),
        ("npu", "torch_npu is not installed", "commlayer-npu[device]"),
    ],
)
def test_describe_says_why_not_and_what_to_do(name: str, reason: str, install: str) -> None:
    result = CliRunner().invoke(build(), ["describe", name, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["viable"] is False
    assert reason in report["reason"]
    assert install in report["install"]
    with pytest.raises(CommError) as caught:
        default_registry().select(name)
    assert reason in str(caught.value)
    assert install in str(caught.value)


@pytest.mark.usefixtures("no_device")
def test_auto_still_chooses_gloo_without_a_device() -> None:
    assert Registry().select("auto").backend.name == "gloo"


def test_a_device_that_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, profile, missing in (
        (nccl, "nccl", lambda: monkeypatch.setattr(torch.cuda, "is_available", lambda: False)),
        (xccl, "xccl", lambda: monkeypatch.setattr(torch.xpu, "is_available", lambda: False)),
    ):
        backend = make(monkeypatch, Vendor(profile))
        missing()
        viability = backend.viability()
        assert not viability.ok
        assert "is visible" in viability.reason
        assert viability.install
    backend = npu(monkeypatch, Vendor("hccl"))
    monkeypatch.setattr(sys.modules["torch_npu"].npu, "is_available", lambda: False)
    assert "no Ascend device" in backend.viability().reason


def test_torch_npu_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> ModuleType:
        raise ImportError("libhccl.so is missing")

    backend = npu(monkeypatch, Vendor("hccl"))
    monkeypatch.setattr(commlayer_npu.importlib, "import_module", fails)
    viability = backend.viability()
    assert not viability.ok
    assert "libhccl.so is missing" in viability.reason
    assert set(backend.versions()) == {"torch"}


def test_versions_name_the_vendors_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl(monkeypatch, Vendor("nccl")).versions()["nccl"] == "2.27.3"
    assert npu(monkeypatch, Vendor("hccl")).versions()["torch_npu"] == "2.8.0"
    assert "oneccl_bindings_for_pytorch" in bindings(monkeypatch, Vendor("ccl_bindings")).versions()


def test_xccl_of_the_first_release_takes_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    backend = xccl(monkeypatch, Vendor("xccl"))
    monkeypatch.setattr(dist, "ProcessGroupXCCL", lambda *args: made.append(args), raising=False)
    backend.group("oneccl/data/0/up/0-1", NoStore(), 1, timedelta(days=24))
    assert [args[1:] for args in made] == [(1, 2)]


@pytest.mark.parametrize("named", [True, False])
def test_xccl_groups_have_the_name_of_their_lane_where_torch_takes_one(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    made: list[Any] = []
    backend = xccl(monkeypatch, Vendor("xccl"))

    class ProcessGroup:
        class Options:
            def __init__(self) -> None:
                if named:
                    self.group_name, self.global_ranks_in_group = "", []

        def __init__(self, store: Named, rank: int, size: int, options: Options) -> None:
            made.append(options)

    monkeypatch.setattr(dist, "ProcessGroupXCCL", ProcessGroup, raising=False)
    backend.group("oneccl/data/0/up/2-5", NoStore(), 1, timedelta(days=24))
    (options,) = made
    if named:
        assert options.group_name == "oneccl/data/0/up/2-5"
        assert options.global_ranks_in_group == [2, 5]
    else:
        assert vars(options) == {"_timeout": timedelta(days=24)}


def test_facts_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, profile in ((nccl, "nccl"), (xccl, "xccl"), (npu, "hccl")):
        semantics = make(monkeypatch, Vendor(profile)).semantics
        assert msgspec.convert(semantics.facts(), Semantics) == semantics
