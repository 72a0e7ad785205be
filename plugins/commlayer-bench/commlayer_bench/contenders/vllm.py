"""vLLM's own coordinator of a pipeline group, on host memory.

Without a device communicator: on some processors that would replace the messages
by a shared-memory path that blocks until the peer has read.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from commlayer_bench.contender import Contender, Finish, Unavailable, Way


def connect(name: str) -> Contender:
    if importlib.util.find_spec("vllm") is None:
        raise Unavailable("vllm is not installed")
    import torch.distributed as dist
    from vllm.distributed.parallel_state import GroupCoordinator

    group = GroupCoordinator(
        group_ranks=[list(range(dist.get_world_size()))],
        local_rank=dist.get_rank(),
        torch_distributed_backend="gloo",
        use_device_communicator=False,
        group_name="bench",
    )

    def send_dict(value: dict[str, Any], dst: int) -> Finish:
        handles = group.isend_tensor_dict(value, dst)

        def finish() -> None:
            for handle in handles:
                handle.wait()

        return finish

    def receive_dict(like: object, src: int) -> Finish:
        value, handles, postprocess = group.irecv_tensor_dict(src)

        def finish() -> Any:
            for handle in handles:
                handle.wait()
            for step in postprocess:
                step()
            return value

        return finish

    def receive_object(like: object, src: int) -> Finish:
        value = group.recv_object(src)
        return lambda: value

    return Contender(
        name,
        {
            "object": Way(lambda value, dst: group.isend_object(value, dst).wait, receive_object),
            "dict": Way(send_dict, receive_dict),
        },
        early=False,
        close=group.destroy,
    )
