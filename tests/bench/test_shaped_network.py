"""Hosts on one machine: they reach each other, bytes are counted, and nothing stays behind."""

import subprocess
import sys

import pytest
from existing import existing

from bench.shaped_network import AccessLink, Traffic, missing, shaped_network

SENT_BYTES = 3_000_000
LINK = AccessLink(80e6, 80e6)
RECEIVE = """
import socket
with socket.create_server(("", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    received = 0
    while data := connection.recv(65536):
        received += len(data)
    print(received, flush=True)
"""
SEND = f"""
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as connection:
    connection.sendall(bytes({SENT_BYTES}))
"""


def namespaces():
    return subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout


def test_links_are_described():
    assert AccessLink().describe() == "unshaped"
    assert AccessLink(1e9, 1e9).describe() == "1000 Mbit/s"
    assert AccessLink(1e7, 1e8).describe() == "10 up, 100 down Mbit/s"


def test_traffic_of_a_while_is_a_difference():
    assert Traffic(5, 9) - Traffic(2, 3) == Traffic(3, 6)


@pytest.mark.slow
def test_what_a_host_sends_is_counted_where_it_leaves_and_where_it_arrives():
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with shaped_network([LINK, AccessLink()]) as network:
        network.shape(1, LINK)
        receiver = subprocess.Popen(
            network.command(0, [sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE, text=True
        )
        with receiver:
            said = existing(receiver.stdout)
            port = said.readline().strip()
            sender = network.command(1, [sys.executable, "-c", SEND, network.address(0), port])
            subprocess.run(sender, check=True, timeout=30)
            assert int(said.readline()) == SENT_BYTES
        arrived, left = network.traffic(0), network.traffic(1)
    for data_bytes, back_bytes in (
        (arrived.received_bytes, arrived.sent_bytes),
        (left.sent_bytes, left.received_bytes),
    ):
        assert SENT_BYTES < data_bytes < 1.1 * SENT_BYTES
        assert 0 < back_bytes < 0.1 * SENT_BYTES


@pytest.mark.slow
def test_nothing_is_left_behind_when_something_fails():
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with pytest.raises(ZeroDivisionError), shaped_network([LINK, AccessLink()]) as network:
        names = [network.namespace(host) for host in range(network.num_hosts)]
        assert all(name in namespaces() for name in names)
        raise ZeroDivisionError
    assert not any(name in namespaces() for name in names)


@pytest.mark.slow
def test_what_a_killed_process_left_behind_is_removed():
    if (reason := missing()) is not None:
        pytest.skip(reason)
    gone = subprocess.Popen(["true"])
    gone.wait()
    subprocess.run(["ip", "netns", "add", f"loco{gone.pid}-0-h0"], check=True)
    with shaped_network([LINK]) as network:
        assert f"loco{gone.pid}-" not in namespaces()
        assert network.namespace(0) in namespaces()
