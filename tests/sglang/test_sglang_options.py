"""The arguments of a server: checked against the installed SGLang, without importing it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from milepost.errors import ConfigError
from milepost.rollout.sglang.options import ELSEWHERE, MILEPOSTS, check_options, server_arguments, server_options
from milepost.rollout.sglang.server import PortReservation


def arguments(device: str = "cpu", *, colocated: bool = True, **options: Any) -> dict[str, Any]:
    return server_arguments(
        model_path=Path("/models/tiny"),
        device=device,
        dtype="float32",
        max_positions=100,
        max_running_requests=16,
        colocated=colocated,
        options=options,
    )


def test_the_options_are_those_of_the_installed_server_args() -> None:
    known = server_options()
    assert {"model_path", "mem_fraction_static", "custom_weight_loader", "enable_deterministic_inference"} <= known
    assert ELSEWHERE.keys() | MILEPOSTS.keys() <= known
    assert {"NS", "A", "_resolved", "__post_init__"}.isdisjoint(known)
    assert set(arguments()) | set(arguments("cuda")) <= known


def test_a_reserved_port_is_given_to_nobody_and_a_server_may_listen_on_it() -> None:
    reservation = PortReservation("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", reservation.port))
    for _ in range(2):  # again after a restart
        address = ("127.0.0.1", reservation.port)
        with socket.create_server(address) as server, socket.create_connection(address) as client:  # SO_REUSEADDR
            connection, _ = server.accept()
            client.sendall(b"hello")
            assert connection.recv(5) == b"hello"
            connection.close()


def test_checking_options_imports_neither_sglang_nor_torch() -> None:
    code = (
        "import sys\n"
        "from milepost.rollout.sglang.options import check_options\n"
        "print([str(p) for p in check_options({'mem_fraction_statik': 0.5})])\n"
        "print([n for n in ('torch', 'sglang.srt', 'aiohttp') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found, imported = done.stdout.splitlines()
    assert "did you mean 'mem_fraction_static'?" in found
    assert imported == "[]"


def test_unknown_and_decided_options_are_all_reported_with_what_to_do() -> None:
    problems = check_options({"attention-backend": "fa3", "tp_size": 2, "port": 1, "zzz": 1, "schedule_policy": "lpm"})
    assert [problem.path for problem in problems] == [
        "engine.options.attention-backend",
        "engine.options.tp_size",
        "engine.options.port",
        "engine.options.zzz",
    ]
    nearest, elsewhere, ours, unknown = (problem.message for problem in problems)
    assert nearest.startswith("SGLang ")
    assert nearest.endswith("has no such option; did you mean 'attention_backend'?")
    assert elsewhere == "is decided by engine.gpus_per_engine; give that instead"
    assert ours == "is not to be given: the launcher decides where an engine listens"
    assert unknown.endswith("see `python -m sglang.launch_server --help`.")
    with pytest.raises(ConfigError, match=r"engine\.options\.zzz"):
        arguments(zzz=1)


def test_defaults_follow_the_device_and_options_win() -> None:
    cpu = arguments()
    assert (cpu["attention_backend"], cpu["sampling_backend"], cpu["max_total_tokens"]) == (
        "torch_native",
        "pytorch",
        1728,
    )
    assert (cpu["context_length"], cpu["max_running_requests"], cpu["tp_size"]) == (108, 16, 1)
    assert "enable_memory_saver" not in cpu
    assert arguments("cuda")["enable_memory_saver"] is True
    assert "enable_memory_saver" not in arguments("cuda", colocated=False)  # nobody wants its memory
    gpu = arguments("cuda", mem_fraction_static=0.7, enable_memory_saver=False)
    assert (gpu["mem_fraction_static"], gpu["enable_memory_saver"], gpu["device"]) == (0.7, False, "cuda")
    assert "attention_backend" not in gpu
    assert arguments(max_total_tokens=500)["max_total_tokens"] == 500
