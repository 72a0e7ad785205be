"""What tests of liveness need of the machine."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def has_ipv6() -> None:
    """Skip where the loopback interface has no IPv6 address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
