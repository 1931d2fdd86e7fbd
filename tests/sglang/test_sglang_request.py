"""What a sender sees of a server that is gone, hangs, hangs up or says no: an error in time, never a wait for ever."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from milepost.errors import EngineGone, TransportError
from milepost.weights.sglang import HttpReceiver, request
from milepost.weights.transport import Manifest


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """Listen, read a request, give this answer (none: keep silent) and hang up."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if answer is None:
                    done.wait(20)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        done.set()
        thread.join()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(EngineGone, match=rf"{endpoint} did not answer /update_weights_from_tensor") as caught:
        HttpReceiver(endpoint, torch.device("cpu")).prepare(Manifest(1, ()))
    assert caught.value.endpoint == endpoint


def test_a_server_that_hangs_costs_the_time_limit() -> None:
    started = time.monotonic()
    with answering(None) as endpoint, pytest.raises(EngineGone, match=r"limit 1 s.*fenced"):
        request(endpoint, "/flush_cache", {}, timeout=1.0)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"])
def test_a_server_that_dies_meanwhile(answer: bytes) -> None:
    with answering(answer) as endpoint, pytest.raises(EngineGone):
        request(endpoint, "/flush_cache", {}, timeout=10.0)


def test_a_server_that_says_no_is_not_gone() -> None:
    said = b'{"message": "busy"}'
    answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)
    with (
        answering(answer) as endpoint,
        pytest.raises(TransportError, match=r"failed with status 400: .*busy") as caught,
    ):
        request(endpoint, "/flush_cache", {}, timeout=10.0)
    assert not isinstance(caught.value, EngineGone)
