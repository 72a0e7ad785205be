"""One rank of a job that torchrun restarts: in attempt 0 one rank is lost, in the next all meet.

Arguments: ``WAY VICTIM MOMENT``.  WAY is ``environment``, or ``group`` for a torch group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

import commlayer

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank = int(os.environ["RANK"])
way, victim, moment = sys.argv[1], int(sys.argv[2]), sys.argv[3]
first = not os.path.exists(os.environ["RESTARTS_FLAG"])


def die() -> None:
    open(os.environ["RESTARTS_FLAG"], "w").close()
    os.kill(os.getpid(), signal.SIGKILL)


def connect() -> commlayer.Communicator:
    settings = {"backend": "gloo", "connect_timeout": 60.0}
    if way == "environment":
        return commlayer.connect(settings)
    # Torch's own groups read what the attempt before has left in torchrun's store, unless they
    # are given a store of this attempt's own.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = TCPStore(address, port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"attempt {attempt}", client),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    return commlayer.connect(settings, group=dist.group.WORLD)


if first and rank == victim and moment == "before":
    die()
if first and rank == victim and moment == "during":
    threading.Timer(0.02, die).start()
comm = connect()
if first and rank == victim:
    if moment == "raises":
        open(os.environ["RESTARTS_FLAG"], "w").close()
        raise ValueError("lost")
    time.sleep(0.1 if moment == "during" else 0)
    die()
said = comm.broadcast_object(("hello", rank), src=0)
assert said == ("hello", 0), said
if first:
    # The launcher ends this rank, too.  One of another agent than the victim's does not count that.
    with contextlib.suppress(commlayer.CommError):
        comm.recv_object(src=(rank + 1) % comm.world_size)
    time.sleep(600)
comm.close()
print(f"rank {rank} has met the others in attempt {attempt}", flush=True)
