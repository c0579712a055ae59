"""Ports that tests reserve."""

import socket
from contextlib import ExitStack

from reserved_ports import reserved_port


def test_reserved_port_that_is_reserved_twice_differs() -> None:
    with reserved_port() as port, reserved_port() as other:
        assert other != port


def test_reserved_port_on_which_a_process_listens_is_left_out() -> None:
    with ExitStack() as stack:
        with reserved_port() as port:  # until the process listens, or another test may get the port
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with reserved_port() as other:
            assert other != port
