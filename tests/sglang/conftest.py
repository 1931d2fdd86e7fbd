"""One real SGLang server for all tests that need one: it takes ten seconds of a core to start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from milepost.rollout.sglang.engine import SGLangEngine
from milepost.rollout.sglang.options import server_arguments
from milepost.rollout.sglang.server import SGLangServer
from milepost.tokenizer import load_tokenizer
from sglang_helpers import MAX_POSITIONS, Served


@pytest.fixture(scope="session", autouse=True)
def _sglang_is_installed() -> None:
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        pytest.fail("SGLang is not installed here; run scripts/install_sglang_cpu.sh PYTHON", pytrace=False)


@pytest.fixture(scope="package")
def served(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sglang")
    model_path = policy / "model"
    arguments = server_arguments(
        model_path=model_path,
        device="cpu",
        dtype="float32",
        max_positions=MAX_POSITIONS,
        max_running_requests=32,
        options={"log_level": "info"},
    )
    server = SGLangServer(arguments, log_path=folder / "logs" / "engine-0.log")
    tokenizer = load_tokenizer(model_path)
    with asyncio.Runner() as runner:

        async def make() -> SGLangEngine:
            engine = SGLangEngine(
                server,
                decode=tokenizer.decode,
                end_token_ids=tokenizer.end_token_ids,
                vocab_size=tokenizer.vocab_size,
                max_positions=MAX_POSITIONS,
            )
            await engine.start()
            return engine

        engine = runner.run(make())
        yield Served(engine, server, tokenizer, model_path, runner)
        server.kill()  # asked to leave, it would wait for requests first
        runner.run(engine.stop())
