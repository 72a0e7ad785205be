"""Variables of the environment that change what a device transport's calls mean."""

from __future__ import annotations

import os

from commlayer.errors import CommError, ErrorKind

_ON = ("1", "t", "true", "y", "yes")
"""What c10d reads as true in such a variable, in any case of letters."""


def refuse_blocking_wait(backend: str, *variables: str) -> None:
    """Raise `CommError` (CONFIG) if one of `variables` lets every native wait block the host.

    They are names of one switch; the first that is set counts, as in c10d.  Where it is
    on, ``wait_blocks`` is not what `backend` declares, and two ranks that send first never
    return.
    """
    name = next((name for name in variables if name in os.environ), None)
    if name is not None and os.environ[name].lower() in _ON:
        raise CommError(
            ErrorKind.CONFIG,
            f"opening backend {backend!r}",
            f"{name}={os.environ[name]} makes every wait on an operation block the host",
            f"Unset {name} for this process; commlayer's own timeouts need no such switch",
        )
