"""SGLang engines of a run: how each is made, and those beside a trainer of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import click
import torch

from milepost.cluster.memory import Memory, read_memory
from milepost.components import Transport
from milepost.config.plan import Plan
from milepost.config.refill import refill_bytes
from milepost.errors import RunError
from milepost.rollout.engine import MemoryTag
from milepost.rollout.sglang.engine import SGLangEngine
from milepost.rollout.sglang.options import server_arguments
from milepost.rollout.sglang.pool import EnginePool, PoolSender
from milepost.rollout.sglang.server import Server, SGLangServer
from milepost.tokenizer import Tokenizer
from milepost.training.trainer import Part, Role, Trainer
from milepost.weights.transport import EngineInfo, PushReport, Sender

WEIGHTS: tuple[Part, ...] = ("weights",)
TRAINING_STATE: tuple[Part, ...] = ("gradients", "optimizer")
EVERYTHING = WEIGHTS + TRAINING_STATE
ALL_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "graphs")

PROGRESS_SECONDS = 15.0
"""How often a starting server is reported on."""


class StartProgress:
    """Says now and then that an engine is still starting; called with the seconds waited so far."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._said = 0.0

    def __call__(self, seconds: float) -> None:
        """Take note of the seconds waited."""
        if seconds < self._said:
            self._said = 0.0  # another start
        if seconds - self._said >= PROGRESS_SECONDS:
            self._said = seconds
            click.echo(f"engine {self._index}: starting, {seconds:.0f} s", err=True)


def engine_arguments(plan: Plan, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of an engine's server on a `cpu` or `cuda` device, but for its address.

    Raises ConfigError for options that the installed SGLang does not have.
    """
    config = plan.config
    return server_arguments(
        model_path=plan.model_path,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        max_positions=_max_positions(plan),
        max_running_requests=config.engine.max_running_requests,
        tensor_parallel=config.engine.gpus_per_engine,
        seed=config.run.seed,
        trust_remote_code=config.model.trust_remote_code,
        colocated=plan.colocated,
        options=config.engine.options,
    )


def engine_environment(plan: Plan) -> dict[str, str]:
    """Return what the environment of a server's processes says beside their node's own."""
    threads = plan.config.run.threads
    return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}


def make_engine(
    plan: Plan, tokenizer: Tokenizer, server: Server, arguments: Mapping[str, Any], index: int
) -> SGLangEngine:
    """Return the engine with this server, not started."""
    return SGLangEngine(
        server,
        decode=tokenizer.decode,
        end_token_ids=tokenizer.end_token_ids,
        vocab_size=plan.layout.vocab_size,
        max_positions=_max_positions(plan),
        index=index,
        seeded=bool(arguments.get("enable_deterministic_inference")),
    )


def make_pool(plan: Plan, engines: Sequence[SGLangEngine]) -> EnginePool:
    """Return the pool of a run's engines, which says on stderr what becomes of them."""
    limit = plan.config.cluster.stall_timeout
    return EnginePool(engines, on_event=lambda text: click.echo(text, err=True), stall_timeout=limit)


async def start_pool(plan: Plan, pool: EnginePool, trainer: Trainer) -> None:
    """Start the engines and, where trainer and engines take turns, put them to sleep.

    A server takes its share of the memory that is free when it starts. The trainer's is in host memory meanwhile.
    """
    if not plan.colocated:
        await pool.start()
        return
    with _aside(plan, trainer):
        await pool.start()
        await pool.sleep(ALL_TAGS)


@contextmanager
def _aside(plan: Plan, trainer: Trainer) -> Iterator[None]:
    roles: tuple[Role, ...] = ("actor", "critic") if plan.needs_critic else ("actor",)
    if not plan.config.trainer.offload:
        yield
        return
    for role in roles:
        trainer.offload(role, TRAINING_STATE)
        trainer.offload(role, WEIGHTS)
    yield
    for role in roles:
        trainer.onload(role, EVERYTHING)


def let_refill(
    plan: Plan,
    pool: EnginePool,
    trainer: Trainer,
    push: Callable[[int, Collection[int]], PushReport],
    memory: Callable[[], Sequence[Memory]],
) -> None:
    """Have the pool refill an engine that was started again, by `push`, which takes a version and engines."""
    moves = plan.colocated and plan.config.trainer.offload
    needed = refill_bytes(plan)

    def refill(index: int) -> PushReport | None:
        if pool.version < 0:
            raise RunError(f"engine {index} was lost before the first push")
        if needed and min(reading.free for reading in memory()) < needed:
            return None
        if not moves:
            return push(pool.version, [index])
        trainer.onload("actor", WEIGHTS)
        try:
            return push(pool.version, [index])
        finally:
            trainer.offload("actor", WEIGHTS)

    # In a thread: the other engines' answers are read meanwhile.
    pool.refill = lambda index: asyncio.to_thread(refill, index)


@asynccontextmanager
async def inline_sglang(
    plan: Plan, tokenizer: Tokenizer, trainer: Trainer, device: torch.device, dtype: torch.dtype
) -> AsyncIterator[tuple[EnginePool, Sender]]:
    """Start servers beside the trainer of this process; give their pool and the sender of its weights.

    The log of each is RUN_DIR/logs/engine-INDEX.log.
    """
    config = plan.config
    arguments = engine_arguments(plan, device.type, dtype)
    engines = []
    for index in range(config.engine.num_engines or 1):
        server = SGLangServer(
            arguments,
            log_path=plan.run_dir / "logs" / f"engine-{index}.log",
            environment=engine_environment(plan),
            on_wait=StartProgress(index),
        )
        engines.append(make_engine(plan, tokenizer, server, arguments, index))
    pool = make_pool(plan, engines)
    try:
        await start_pool(plan, pool, trainer)
        here = trainer.world.ranks[0]
        infos = [
            EngineInfo(engine.index, engine.endpoint, (here.device,), config.engine.gpus_per_engine, node=here.node)
            for engine in engines
        ]
        transport: Transport = plan.transport.build()
        address = replace(transport.open(trainer.world, infos), verify=config.transport.verify)
        sender = transport.sender(address, rank=0)

        def push(version: int, engines: Collection[int]) -> PushReport:
            return sender.push(version, trainer.source("actor"), engines)

        let_refill(plan, pool, trainer, push, lambda: [read_memory(device)])
        yield pool, PoolSender(sender, pool)
    finally:
        await pool.stop()


def _max_positions(plan: Plan) -> int:
    return plan.config.rollout.max_context_len or plan.layout.max_positions
