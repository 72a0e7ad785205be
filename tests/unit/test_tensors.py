"""What can be sent, its description and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from bits import filled, without_memory
from torch import Tensor

from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.wire.tensors import (
    DTYPES,
    TensorMeta,
    as_bytes,
    from_meta,
    meta_of,
    sendable,
)

WHERE = "isend to rank 1"


def raw(tensor: Tensor) -> bytes:
    return bytes(as_bytes(tensor.detach().contiguous()).tolist())


def travel(tensor: Tensor) -> Tensor:
    """To the other side by way of what really travels: an encoded description and bytes."""
    sent = sendable(tensor, WHERE, CommConfig())
    meta = msgspec.msgpack.decode(msgspec.msgpack.encode(meta_of(sent)), type=TensorMeta)
    meta.check(CommConfig(), WHERE)
    received = from_meta(meta, "cpu")
    assert as_bytes(sent).numel() == meta.nbytes == as_bytes(received).numel()
    as_bytes(received).copy_(as_bytes(sent))
    return received


def test_every_usual_dtype_is_known_by_name() -> None:
    usual = {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}
    usual |= {"float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"}
    usual |= {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
    assert usual <= DTYPES.keys()
    assert not {"int4", "uint1", "quint8", "qint32", "bits8"} & DTYPES.keys()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (5,), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_round_trip_of_every_dtype(name: str, shape: tuple[int, ...]) -> None:
    tensor = filled(DTYPES[name], *shape)
    received = travel(tensor)
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    assert raw(received) == raw(tensor)


def inference_view() -> Tensor:
    with torch.inference_mode():
        return torch.arange(12.0).reshape(3, 4).t()


VIEWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "strided": lambda: torch.arange(10)[::3],
    "offset": lambda: torch.arange(10)[4:7],
    "odd strides of extent one": lambda: torch.arange(12.0).as_strided((3, 1, 4), (4, 77, 1)),
    "channels last": lambda: (
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    ),
    "requires grad": lambda: torch.arange(3.0, requires_grad=True),
    "inside a graph": lambda: (torch.arange(6.0, requires_grad=True) * 2)[1:4],
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "buffer": lambda: torch.nn.Buffer(torch.arange(3.0)),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "inference": inference_view,
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())
def test_round_trip_of_views(make: Callable[[], Tensor]) -> None:
    tensor = make()
    received = travel(tensor)
    assert type(received) is Tensor
    assert not received.requires_grad
    assert received.is_contiguous()
    assert received.dtype == tensor.dtype
    assert received.tolist() == tensor.tolist()


class Tagged(Tensor):
    """A subclass with memory of its own and a hook on every function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("the codec must not run code of a subclass")


def test_a_subclass_with_plain_memory_arrives_plain() -> None:
    plain = torch.arange(4.0)
    tagged = plain.as_subclass(Tagged)
    sent = sendable(tagged, WHERE, CommConfig())
    assert type(sent) is Tensor
    assert as_bytes(sent).data_ptr() == plain.data_ptr()
    assert meta_of(sent) == TensorMeta("float32", (4,), "cpu")


def test_nothing_is_copied_without_need() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for tensor in (base, base[1:], base.detach().requires_grad_(), torch.nn.Parameter(base)):
        sent = sendable(tensor, WHERE, CommConfig())
        assert as_bytes(sent).data_ptr() == tensor.data_ptr()
    assert sendable(base, WHERE, CommConfig()) is base


def fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)


def shrunk() -> Tensor:
    columns = torch.arange(6.0).reshape(2, 3)[:, ::2]
    columns.untyped_storage().resize_(20)
    return columns


def functional() -> Tensor:
    return torch._to_functional_tensor(torch.arange(3.0))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse coo": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8), "qint8"),
    "sub-byte": (lambda: torch.empty(3, dtype=torch.uint4), "uint4"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "empty meta": (lambda: torch.empty(0, device="meta"), "meta"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "NestedTensor",
    ),
    "fake": (fake, "FakeTensor"),
    "functional": (functional, "no memory"),
    "shrunk": (shrunk, "no memory"),
    "freed": (lambda: without_memory(0), "no memory"),
    "lazy": (lambda: torch.nn.UninitializedParameter(), "lazy"),
    "not a tensor": (lambda: [1, 2], "list is not a tensor"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "cause"), REFUSED.values(), ids=REFUSED.keys())
def test_what_has_no_plain_memory_is_refused(make: Callable[[], Any], cause: str) -> None:
    with pytest.raises(CommError) as caught:
        sendable(make(), WHERE, CommConfig())
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert caught.value.operation == WHERE
    assert cause in caught.value.cause
    assert caught.value.cure


@pytest.mark.parametrize(
    "transform", [torch.vmap, torch.func.functionalize], ids=["vmap", "functionalize"]
)
def test_tensors_inside_a_transform_are_refused(transform: Any) -> None:
    def inside(tensor: Tensor) -> Tensor:
        with pytest.raises(CommError, match="no memory"):
            sendable(tensor, WHERE, CommConfig())
        return tensor

    transform(inside)(torch.ones(2, 3))


def test_allocation_ignores_the_device_context_of_the_thread() -> None:
    with torch.device("meta"):
        assert from_meta(TensorMeta("float32", (2,), "cpu"), "cpu").device.type == "cpu"


HOSTILE = {
    "terabyte": TensorMeta("uint8", (1 << 40,), "cpu"),
    "sum over the limit": TensorMeta("float32", (1 << 20, 1 << 20), "cpu"),
    "product beyond 64 bits": TensorMeta("uint8", (1 << 62, 1 << 62), "cpu"),
    "extent beyond 64 bits": TensorMeta("uint8", (0, 1 << 64), "cpu"),
    "empty with impossible strides": TensorMeta("uint8", (0, 1 << 40, 1 << 40), "cpu"),
    "negative": TensorMeta("uint8", (-1,), "cpu"),
    "two negatives": TensorMeta("uint8", (-2, -2), "cpu"),
    "many dimensions": TensorMeta("uint8", (1,) * 65, "cpu"),
    "unknown dtype": TensorMeta("float3", (1,), "cpu"),
    "dtype that is an attribute": TensorMeta("load", (1,), "cpu"),
    "quantized dtype": TensorMeta("qint8", (1,), "cpu"),
    "device with an index": TensorMeta("uint8", (1,), "cuda:0"),
    "no device": TensorMeta("uint8", (1,), ""),
}


@pytest.mark.parametrize("meta", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_descriptions_are_refused(meta: TensorMeta) -> None:
    with pytest.raises(CommError) as caught:
        meta.check(CommConfig(), WHERE)
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert caught.value.cure


def test_the_limit_is_inclusive() -> None:
    limits = CommConfig(max_message_bytes=12)
    TensorMeta("float32", (3,), "cpu").check(limits, WHERE)
    TensorMeta("float32", (1 << 50, 0), "cpu").check(limits, WHERE)
    with pytest.raises(CommError, match="max_message_bytes = 12"):
        TensorMeta("float32", (4,), "cpu").check(limits, WHERE)


def test_what_is_too_large_is_refused_before_it_is_copied() -> None:
    with pytest.raises(CommError, match="exceed max_message_bytes = 16"):
        sendable(torch.ones(1).expand(5), WHERE, CommConfig(max_message_bytes=16))
    with pytest.raises(CommError, match=r"cannot make a tensor of torch\.float32 contiguous"):
        sendable(torch.ones(1).expand(1 << 50), WHERE, CommConfig(max_message_bytes=1 << 60))


def test_a_dtype_that_torch_cannot_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def contiguous(self: Tensor) -> Tensor:
        raise NotImplementedError('"copy_" not implemented for this dtype')

    monkeypatch.setattr(Tensor, "contiguous", contiguous)
    with pytest.raises(CommError, match=r"cannot make a tensor of torch\.float32 contiguous"):
        sendable(torch.zeros(4, 4).t(), "isend", CommConfig())
