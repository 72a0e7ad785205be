"""What the thread that calls may have set up: modes under which memory is not real, compilers.

Modes of torch (fake tensors, functional tensors, any dispatch mode, the
transforms of `torch.func`) are of a thread.  Under some, an operation on real
memory gives a tensor that has none, which a transport must never see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import _functorch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from commlayer.errors import About, CommError, ErrorKind

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_SAMPLE = torch.zeros(1, device="cpu")
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
transform: Callable[[], object] = _functorch.maybe_current_level


def refuse_modes(operation: About) -> None:
    """Raise `CommError` (UNSUPPORTED) if this thread has a mode under which memory is not real.

    Modes that only look on (a profiler's, a counter's, the side stream's checker) are none.
    """
    if dispatch_modes() and not _makes_memory():
        names = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
        what = " or ".join(names)
    elif transform() is not None:
        what = "a transform of torch.func"
    else:
        return
    raise CommError(
        ErrorKind.UNSUPPORTED,
        operation,
        f"{what} is active on this thread, and tensors made under this mode have no memory",
        "Send and receive outside of the mode",
    )


def _makes_memory() -> bool:
    """Whether new tensors, and views of those that are there, are plain and have memory."""
    try:
        made, view = torch.empty(1, device="cpu"), _SAMPLE.as_strided((1,), (1,))
        return (
            type(made) is torch.Tensor
            and type(view) is torch.Tensor
            and made.data_ptr() != 0
            and view.data_ptr() == _SAMPLE.data_ptr()
        )
    except Exception:  # a mode may refuse real tensors, or anything
        return False


def outside_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate what works on real memory, on whatever thread waits.

    Modes under which memory is not real see nothing of it.  Those that only look on stay:
    switching dispatch off is of the thread, and the simulator's ranks share one.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if (not dispatch_modes() or _makes_memory()) and transform() is None:
            return function(*args, **kwargs)
        with torch._C._DisableTorchDispatch(), temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return call


def uncompiled(cls: C) -> C:
    """Decorate a class: `torch.compile` breaks its graph at every public method and runs it.

    Otherwise it would follow the method inwards, where a tensor that it traces
    has no memory.
    """
    for name, method in list(vars(cls).items()):
        if callable(method) and not name.startswith("_"):
            setattr(cls, name, _uncompiled(method))
    return cls


def _uncompiled(method: Callable[P, R]) -> Callable[P, R]:
    disabled: list[Any] = []

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # The compiler takes the first for true, and does not always look at this frame.
        if not (is_compiling() or get_eval_frame_callback() is not None):
            return method(*args, **kwargs)
        if not disabled:  # as late as here, because it imports the compiler
            disabled.append(torch.compiler.disable(method))  # type: ignore[no-untyped-call]
        result: R = disabled[0](*args, **kwargs)
        return result

    return call
