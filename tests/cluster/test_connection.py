"""The driver's connection to a cluster."""

import time

import pytest

from agentrl.config.schema.cluster import ClusterConfig
from agentrl.errors import ClusterError

pytest.importorskip("ray")

from agentrl.cluster.connection import connected


def refuse(address: str) -> ClusterError:
    with pytest.raises(ClusterError) as caught, connected(ClusterConfig(address=address)):
        raise AssertionError("it is connected")
    return caught.value


def test_an_address_at_which_nothing_listens_is_refused_at_once():
    started = time.monotonic()
    error = refuse("127.0.0.1:1")
    assert "cannot connect to the Ray cluster at 127.0.0.1:1: Connection refused" in str(error)
    assert error.details["key"] == "cluster.address"
    assert time.monotonic() - started < 10
