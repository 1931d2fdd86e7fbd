"""The process beside one SGLang server on Ray: it starts the server on its node, watches it and reads its log.

The server is a process of its own, so that its death is no actor's; the controller talks HTTP to it. It dies with this
process (`milepost.rollout.sglang.launch` looks after that), so no server outlives its run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from milepost.cluster.failures import Outcome
from milepost.cluster.host import Host
from milepost.cluster.logs import log_folder
from milepost.cluster.messages import Setup
from milepost.rollout.sglang.server import SGLangServer


class SGLangHost(Host):
    """Runs one server; every call but those of `Host` runs in one event loop. What both print is in one log."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._server: SGLangServer | None = None

    async def start(self, arguments: Mapping[str, Any], host: str, environment: Mapping[str, str]) -> Outcome:
        """Start the server, anew if there was one, and wait until it answers; returns its endpoint.

        `arguments`, `host` and `environment` are those of `SGLangServer`, which keeps its address from the first start.
        """

        async def start() -> str:
            if self._server is None:
                log = log_folder(self.setup.run_dir) / f"{self.setup.name}.log"
                self._server = SGLangServer(arguments, log_path=log, host=host, environment=environment)
            await self._server.start()
            return self._server.endpoint

        return await self._run("start server", start())

    async def alive(self) -> Outcome:
        """Whether the server's process is there."""
        return Outcome(self._server is not None and await self._server.alive())

    async def log_tail(self) -> Outcome:
        """Return the path of the log and its last lines."""
        return Outcome("" if self._server is None else await self._server.log_tail())

    async def stop(self) -> Outcome:
        """Shut the server down."""

        async def stop() -> None:
            if self._server is not None:
                await self._server.stop()

        return await self._run("stop server", stop())

    async def _run(self, phase: str, work: Awaitable[Any]) -> Outcome:
        with self.phase(phase):
            try:
                return Outcome(await work)
            except Exception as error:  # noqa: BLE001  the controller raises it again
                return self.failed(phase, error)
