"""Tensors whose memory goes away, or never was, while the library has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from commlayer_testkit.local import SERIALIZED, WAITED, connected
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from commlayer.communicator import Communicator
from commlayer.errors import CommError, ErrorKind

INLINE = 64


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Communicator]]:
    with connected(inline_bytes=INLINE) as comms:
        yield comms


def freed(target: Tensor) -> None:
    target.untyped_storage().resize_(0)


def shrunk(target: Tensor) -> None:
    target.untyped_storage().resize_(target.untyped_storage().nbytes() - 1)


TARGETS: dict[str, Callable[[int], Tensor]] = {
    "contiguous": lambda n: torch.zeros(n),
    "strided": lambda n: torch.zeros(n, 2)[:, 1],
    "with a gradient": lambda n: torch.zeros(n, requires_grad=True),
}


@pytest.mark.parametrize("elements", [5, 500], ids=["inline", "large"])
@pytest.mark.parametrize("lose", [freed, shrunk])
@pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("call", ["irecv", "broadcast"])
def test_a_target_that_lost_its_memory_fails_its_receive_only(
    call: str,
    make: Callable[[int], Tensor],
    lose: Callable[[Tensor], None],
    elements: int,
    pair: list[Communicator],
) -> None:
    a, b = pair
    target, following = make(elements), torch.zeros(elements)
    if call == "irecv":
        receives = [b.irecv(target, 0), b.irecv(following, 0)]
    else:
        receives = [b.broadcast(one, 0, async_op=True) for one in (target, following)]
    lose(target)
    for number in (1.0, 2.0):
        value = torch.full((elements,), number)
        if call == "irecv":
            a.isend(value, 1)
        else:
            a.broadcast(value, 0, async_op=True)
    with pytest.raises(CommError, match="lost its memory") as caught:
        receives[0].wait(30)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert caught.value.peer == 0
    assert "later ones are not" in caught.value.cure
    assert receives[1].result(30) is following
    assert following.sum() == 2 * elements
    a.drain(30)


def test_a_target_that_moved_is_written_where_it_is(pair: list[Communicator]) -> None:
    a, b = pair
    for elements in (5, 500):
        target = torch.zeros(elements)
        receive = b.irecv(target, 0)
        target.untyped_storage().resize_(1 << 20)
        a.isend(torch.ones(elements), 1)
        receive.wait(30)
        assert target.sum() == elements


# Tensors that never had memory


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def empty_fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(0)


class Wrapper(Tensor):
    """A subclass that has a shape and no memory."""

    @staticmethod
    def __new__(cls) -> Any:
        return Tensor._make_wrapper_subclass(cls, (3,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


class Logged(Tensor):
    """A subclass with memory, of which every operation is seen."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


GHOSTS: dict[str, Callable[[], Tensor]] = {
    "fake": fake,
    "empty fake": empty_fake,
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "wrapper": Wrapper,
    "logged": lambda: torch.ones(3).as_subclass(Logged),
    "meta": lambda: torch.ones(3, device="meta"),
    "empty meta": lambda: torch.ones(0, device="meta"),
    "efficient zero": lambda: torch._efficientzerotensor(3),
    "uninitialised": lambda: torch.nn.UninitializedParameter(),
}


@pytest.mark.parametrize("make", GHOSTS.values(), ids=GHOSTS)
def test_what_has_no_memory_is_refused_both_ways(
    make: Callable[[], Tensor], pair: list[Communicator]
) -> None:
    ghost = make()
    for comm in pair:
        other = 1 - comm.rank
        for call in (
            lambda c=comm, o=other: c.isend(ghost, o),
            lambda c=comm, o=other: c.irecv(ghost, o),
            lambda c=comm, o=other: c.isend_object([ghost], o),
            lambda c=comm, o=other: c.isend_tensor_dict({"x": ghost}, o),
            lambda c=comm: c.broadcast(ghost, 0),
            lambda c=comm: c.broadcast(ghost, 1),
        ):
            with pytest.raises(CommError) as caught:
                call()
            assert caught.value.kind is ErrorKind.UNSUPPORTED
            assert caught.value.cure
    works(pair)


def works(pair: list[Communicator]) -> None:
    a, b = pair
    for elements in (3, 500):
        a.isend(torch.arange(elements), 1)
        a.isend_object(["fine", torch.ones(elements)], 1)
        assert torch.equal(b.irecv(None, 0).result(30), torch.arange(elements))
        assert b.irecv_object(0).result(30)[0] == "fine"


# Modes of the thread that give tensors without memory


class Quiet(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Meta(TorchDispatchMode):
    """A mode of somebody's own under which nothing has memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.to("meta") if type(result) is Tensor else result


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "fake": lambda: FakeTensorMode(),
    "fake beside real": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "functional": lambda: FunctionalTensorMode(),
    "own": Meta,
}


def every_post(comm: Communicator, tensor: Tensor) -> list[Callable[[], Any]]:
    other = 1 - comm.rank
    return [
        lambda: comm.isend(tensor, other),
        lambda: comm.send(tensor, other),
        lambda: comm.irecv(tensor, other),
        lambda: comm.irecv(None, other),
        lambda: comm.isend_object([tensor], other),
        lambda: comm.isend_object("text", other),
        lambda: comm.irecv_object(other),
        lambda: comm.isend_tensor_dict({"x": tensor}, other),
        lambda: comm.irecv_tensor_dict(other),
        lambda: comm.broadcast(tensor, comm.rank),
        lambda: comm.broadcast(None, other),
        lambda: comm.broadcast_object(1, comm.rank),
        lambda: comm.broadcast_tensor_dict({"x": tensor}, comm.rank),
    ]


@pytest.mark.parametrize("elements", [5, 500], ids=["inline", "large"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_mode_that_makes_tensors_without_memory_is_refused(
    mode: Callable[[], AbstractContextManager[Any]], elements: int, pair: list[Communicator]
) -> None:
    real = torch.ones(elements)
    for call in every_post(pair[0], real):
        with mode(), pytest.raises(CommError, match="mode") as caught:
            call()
        assert caught.value.kind is ErrorKind.UNSUPPORTED
        assert caught.value.cure
    works(pair)


def test_a_mode_that_changes_nothing_is_no_matter(pair: list[Communicator]) -> None:
    with Quiet(), FlopCounterMode(display=False):
        works(pair)


@pytest.mark.parametrize(
    "transform",
    [torch.vmap, torch.func.functionalize, lambda f: torch.func.grad(lambda x: f(x).sum())],
    ids=["vmap", "functionalize", "grad"],
)
def test_inside_a_transform_nothing_is_posted(transform: Any, pair: list[Communicator]) -> None:
    real = torch.ones(500)

    def inside(tensor: Tensor) -> Tensor:
        for call in every_post(pair[0], real):
            with pytest.raises(CommError) as caught:
                call()
            assert caught.value.kind is ErrorKind.UNSUPPORTED
        return tensor

    transform(inside)(torch.ones(2, 3))
    works(pair)


@pytest.mark.parametrize(
    ("semantics", "wait_mode"),
    [(WAITED, "safe"), (WAITED, "direct"), (SERIALIZED, "safe")],
    ids=["waited", "direct", "polled"],
)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_what_was_posted_before_completes_inside_a_mode(
    mode: Callable[[], AbstractContextManager[Any]], semantics: Any, wait_mode: str
) -> None:
    with connected(semantics=semantics, inline_bytes=INLINE, wait_mode=wait_mode) as (a, b):
        for elements in (5, 500):
            target = torch.zeros(elements)
            receives = [b.irecv(target, 0), b.irecv(None, 0), b.irecv_tensor_dict(0)]
            sends = [a.isend(torch.ones(elements), 1) for _ in range(2)]
            sends.append(a.isend_tensor_dict({"x": torch.ones(elements)}, 1))
            with mode():
                results = [receive.result() for receive in receives]
                for send in sends:
                    send.wait()
            results[2] = results[2]["x"]
            assert all(type(result) is Tensor and result.sum() == elements for result in results)


def test_a_mode_that_only_looks_on_disturbs_nothing() -> None:
    """Counters of operations and profilers are dispatch modes, too."""
    with connected() as (a, b), Quiet():
        for elements in (3, 5000):
            a.isend(torch.arange(elements), 1)
            assert torch.equal(b.recv(None, 0), torch.arange(elements))
        a.isend_tensor_dict({"x": torch.ones(4).t()}, 1)
        assert b.recv_tensor_dict(0)["x"].sum() == 4
