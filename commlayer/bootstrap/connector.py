"""`connect`: from a configuration to a communicator."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from commlayer.backend import World
from commlayer.bootstrap import at_exit
from commlayer.bootstrap.hello import Hello, agree
from commlayer.bootstrap.launch import (
    Generation,
    check_launcher,
    explicit_generation,
    launched_generation,
    refusal,
)
from commlayer.bootstrap.rendezvous import Rendezvous
from commlayer.bootstrap.split import Splitter
from commlayer.bootstrap.turns import turn
from commlayer.bootstrap.worlds import (
    torch_is_initialised,
    world_of_given,
    world_of_group,
    world_of_job,
)
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.descriptors import need_descriptors, out_of_descriptors
from commlayer.device.backend import PairEndpoint, StreamBackend
from commlayer.device.device import DeviceThreads
from commlayer.device.opening import Flow, first_lanes
from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ConfigError, ErrorKind
from commlayer.lanes.connection import Connection
from commlayer.lanes.context import Prefetch
from commlayer.lanes.peer import Whereabouts
from commlayer.liveness.meeting import Meeting, PeerLink
from commlayer.loading import LoadedBackend
from commlayer.observe.observation import Observation
from commlayer.progress.choose import choose_progress
from commlayer.progress.ledger import Ledger
from commlayer.progress.policies import check_sound
from commlayer.progress.reaping import ReapingPolicy, reaping_policy
from commlayer.progress.retention import RetentionPolicy, retention_policy
from commlayer.progress.runtime import Runtime, ThreadRuntime
from commlayer.progress.serialized import SerializedEndpoint
from commlayer.registry import Registry, default_registry
from commlayer.semantics import Order, PostMayBlock, Semantics, Threads, WaitBlocks
from commlayer.session import Session
from commlayer.versions import installed_version
from commlayer.wire.frame import WIRE_VERSION
from commlayer.wire.tags import TagMap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_DESCRIPTORS = 8
"""What liveness opens beside its connections (a listener, a pair to wake its thread), and spare
ones for connections of strangers."""


def connect(
    config: Mapping[str, Any] | CommConfig | None = None,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    store: Any = None,
    generation: int | None = None,
    retention: RetentionPolicy | None = None,
    reaping: ReapingPolicy | None = None,
    registry: Registry | None = None,
) -> Communicator:
    """Connect the ranks and return their communicator.

    `config` is a `CommConfig`, or a mapping of its keys that is completed from
    a TOML file and the environment (see `CommConfig.load`).  All ranks call it,
    each with the same settings; with `group` only the members of that
    ``torch.distributed`` group do, and ranks are local to it.  A group may be a
    ``DeviceMesh`` or a dimension of one (``mesh["pp"]``).  Groups of the same members
    are told apart by their own names.  `retention` and `reaping` replace the configured
    policies.

    Without a group the ranks are those of the backend's own launcher (``mpiexec``), of
    the default group where ``torch.distributed`` is initialised, or of the environment
    as ``torchrun`` makes it; one rank where no launcher says otherwise.  `rank`,
    `world_size` and `store` (a ``torch.distributed`` store that the ranks share) say it
    instead; what is not given is taken from ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``
    and ``MASTER_PORT``.

    Ranks that have lost a peer connect anew with its replacement, under the same name
    and in the same processes.  `generation` counts these attempts: a rank that is behind
    the others is refused by name instead of being taken in.  By default it is the number
    of restarts that ``torchrun`` has counted, if that can be the same on all ranks.

    Blocks until all ranks have called it, for at most ``connect_timeout``
    seconds, and answers signals meanwhile.  Raises `CommError`: CONFIG, PLUGIN,
    UNSUPPORTED, TIMEOUT naming absent ranks, or PEER_LOST when a rank or the store is
    lost meanwhile.
    """
    with _only_comm_errors():
        if not isinstance(config, CommConfig):
            config = CommConfig.load(config)
        attempt = None if generation is None else explicit_generation(generation)
        at_exit.install()  # a start-up that is given up may leave a thread behind, too
        registry = registry or default_registry()
        config = registry.hooks().commlayer_configure(config=config) or config
        loaded = registry.select(config.backend)
        deadline = time.monotonic() + config.connect_timeout
        given = (rank, world_size, store) != (None, None, None)
        if group is not None and given:
            raise refusal(
                "group= says who connects, and so do rank=, world_size= and store=", "Pass either"
            )
        if group is not None:
            world = world_of_group(config, group)
        elif given:
            world = world_of_given(config, rank, world_size, store)
        else:
            if not torch_is_initialised():
                check_launcher(registry, loaded.backend.name)
            world = world_of_job(config, loaded.backend)
        world = dataclasses.replace(world, deadline=deadline)
        with turn(world, store):
            return connect_world(
                world,
                loaded,
                config,
                registry=registry,
                generation=attempt,
                retention=retention,
                reaping=reaping,
            )


@contextmanager
def _only_comm_errors() -> Iterator[None]:
    """Turn what torch, a plugin or a policy raises while connecting into a `CommError`."""
    try:
        yield
    except CommError:
        raise
    except Exception as error:
        failure = out_of_descriptors("connect", error) or ConfigError(
            "connect",
            f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            "See the traceback of the cause: torch, a plugin or a policy has raised it",
        )
        raise failure from error


def connect_world(
    world: World,
    loaded: LoadedBackend,
    config: CommConfig,
    *,
    registry: Registry | None = None,
    runtime: Runtime | None = None,
    generation: Generation | None = None,
    retention: RetentionPolicy | None = None,
    reaping: ReapingPolicy | None = None,
) -> Communicator:
    """Connect the ranks of `world` over a loaded backend.

    The part of `connect` that is the same for real ranks and simulated ones;
    `runtime` is what progress of the latter runs on, and they have met already: each
    says what this one says.  `generation` is by default what the launcher has counted.
    """
    backend = loaded.backend
    semantics = backend.semantics
    simulated = runtime is not None
    generation = generation or launched_generation()
    runtime = runtime or ThreadRuntime()
    if isinstance(backend, StreamBackend):
        # Drivers of host lanes let go of device objects, too.
        runtime = DeviceThreads(runtime, backend.device())
    registry = registry or default_registry()
    loaded_host = _host(loaded, registry)
    host = loaded_host.backend
    _check_supported(host.semantics, host.name)
    if host is not backend and semantics.threads is Threads.FUNNELED:
        raise CommError(
            ErrorKind.UNSUPPORTED,
            f"backend {backend.name!r}",
            "threads = FUNNELED: device operations are posted on the threads that call",
            "Declare (and prove) a stronger fact in the plugin",
        )
    hooks = registry.hooks(loaded)
    connect_part = functools.partial(
        _connect_part, loaded, registry=registry, retention=retention, reaping=reaping
    )
    retention = (
        retention
        or hooks.commlayer_retention_policy(semantics=semantics, config=config)
        or retention_policy(config)
    )
    reaping = (
        reaping
        or hooks.commlayer_reaping_policy(semantics=semantics, config=config)
        or reaping_policy(config)
    )
    check_sound(retention, semantics, backend.name)
    check_sound(reaping, semantics, backend.name)
    direct = config.wait_mode == "direct" and host is backend
    progress = choose_progress(config.progress, host.semantics, runtime, host.name, direct=direct)
    tags = TagMap(config.channels)
    serial = _serial(host.semantics)
    prefetch = Prefetch(1, 0) if serial else Prefetch(config.headers_ahead, config.payloads_ahead)
    machine, pid = Hello.whereabouts()
    hello = Hello(
        wire_version=WIRE_VERSION,
        backend=backend.name,
        channels=tags.channels,
        inline_bytes=config.inline_bytes,
        allow_pickle=config.allow_pickle,
        facts=semantics,
        headers_ahead=prefetch.headers,
        payloads_ahead=prefetch.slots,
        version=installed_version(),
        host=machine,
        pid=pid,
    )
    with ExitStack() as stack:
        hellos = dict.fromkeys(range(world.size), hello)
        links: dict[int, PeerLink] = {}
        if not simulated:
            rendezvous = stack.enter_context(Rendezvous(world, generation))
            world, hellos, links = stack.enter_context(_met(rendezvous, hello, config))
        options = dict(config.options)
        host_options = options if host is backend else options.pop("host", {})
        transport = loaded_host.open(world, host_options)
        endpoint = loaded_host.endpoint(transport, "p2p")
        if host.semantics.threads is Threads.SERIALIZED:
            endpoint = SerializedEndpoint(endpoint, runtime)
        device: DeviceSide | None = None

        ledger = Ledger(runtime, reaping, config, progress)
        if isinstance(backend, StreamBackend):
            device = DeviceSide(
                backend.open(world, options),
                semantics,
                runtime,
                ledger,
                progress.block,
                config.max_device_lanes,
            )
            _open_device_lanes(device, world, config)
        connection = Connection(
            rank=world.rank,
            size=world.size,
            endpoint=endpoint,
            tags=tags,
            runtime=runtime,
            ledger=ledger,
            progress=progress,
            config=config,
            serial=serial,
            prefetch=prefetch,
            peers_prefetch={
                rank: Prefetch(hello.headers_ahead, hello.payloads_ahead)
                for rank, hello in hellos.items()
            },
            whereabouts={
                rank: Whereabouts(hello.host, hello.pid) for rank, hello in hellos.items()
            },
            device=device,
            links=links,
        )

        def release() -> None:
            if device is not None:
                device.close(config.close_timeout)
            endpoint.close()
            transport.close()
            at_exit.unwatch(session)

        session = Session(
            connection=connection,
            backend=backend.name,
            semantics=semantics,
            host_devices=host.semantics.devices,
            config=config,
            retention=retention,
            release=release,
        )
        channels: dict[str, Communicator] = {}
        for name in tags.channels:
            channels[name] = Communicator(session, name, channels)
        listeners = hooks.commlayer_event.get_hookimpls()
        session.observation = Observation(
            connection,
            config,
            backend=backend.name,
            steps=session.steps,
            emit=hooks.commlayer_event if listeners else None,
            monitored=not simulated,
        )
        connection.open()
        session.observation.start()
        if not simulated:
            session.split = Splitter(world, config, connect_part)
            at_exit.watch(session, (transport, endpoint, device))
        return channels["data"]


def _connect_part(
    loaded: LoadedBackend, world: World, config: CommConfig, **chosen: Any
) -> Communicator:
    """Connect some of the ranks of a communicator, as its own were."""
    with _only_comm_errors():
        return connect_world(world, loaded, config, **chosen)


@contextmanager
def _met(
    rendezvous: Rendezvous, hello: Hello, config: CommConfig
) -> Iterator[tuple[World, dict[int, Hello], dict[int, PeerLink]]]:
    """The ranks have met: the world that they share, what they say, their liveness connections.

    A ``with`` block that fails closes the latter.
    """
    world = rendezvous.world
    need_descriptors("connect", world.size + _DESCRIPTORS)
    with world.call(lambda: Meeting(world, config.peer_timeout, config.bind_address)) as meeting:
        said = rendezvous.meet(replace(hello, contact=meeting.contact).encode())
        hellos = agree(world.rank, hello, said)
        contacts = {rank: other.contact for rank, other in hellos.items()}
        links = rendezvous.world.call(lambda: meeting.meet(contacts))
        yield rendezvous.world, hellos, links


def _open_device_lanes(device: DeviceSide, world: World, config: CommConfig) -> None:
    """Make the communicators of the lanes without tags, before anything is under way."""
    budget = min(config.device_lanes_at_connect, config.max_device_lanes)
    for peer, flow in first_lanes(world.rank, world.size, config.channels, budget):

        def make(peer: int = peer, flow: Flow = flow) -> PairEndpoint:
            device.device.attach()  # on whatever thread `call` makes it
            return device.maker.make(peer, flow)

        device.connected(peer, flow, world.call(make))


def _host(loaded: LoadedBackend, registry: Registry) -> LoadedBackend:
    """The backend that carries headers and host tensors: the backend itself, unless on streams."""
    if not isinstance(loaded.backend, StreamBackend):
        return loaded
    return registry.select(loaded.backend.host)


def _check_supported(semantics: Semantics, backend: str) -> None:
    missing = ""
    if semantics.p2p.wait_blocks is not WaitBlocks.HOST:
        missing = "wait_blocks = STREAM needs a StreamBackend, which is paired with a host backend"
    elif not semantics.tags:
        missing = "tags = False: lanes need tags that match independently"
    elif "cpu" not in semantics.devices:
        missing = "headers travel in host memory, and 'cpu' is not among its devices"
    if missing:
        raise CommError(ErrorKind.UNSUPPORTED, f"backend {backend!r}", missing, "")


def _serial(semantics: Semantics) -> bool:
    facts = semantics.p2p
    return (
        facts.order is not Order.PER_TAG
        or facts.max_outstanding_per_pair > 0
        or facts.post_may_block is not PostMayBlock.NEVER
        or semantics.threads is Threads.FUNNELED
    )
