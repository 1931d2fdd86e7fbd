"""SGLang engines for a run whose trainer is in this process: servers beside it, a pool in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import click
import torch

from milepost.components import Transport
from milepost.config.plan import Plan
from milepost.errors import RunError
from milepost.rollout.sglang.engine import SGLangEngine
from milepost.rollout.sglang.options import server_arguments
from milepost.rollout.sglang.pool import EnginePool, PoolSender
from milepost.rollout.sglang.server import SGLangServer
from milepost.tokenizer import Tokenizer
from milepost.training.trainer import Part, Trainer
from milepost.weights.transport import EngineInfo, PushReport, Sender

WEIGHTS: tuple[Part, ...] = ("weights",)

PROGRESS_SECONDS = 15.0
"""How often a starting server is reported on."""


def build_sglang_engine(
    plan: Plan, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype, index: int = 0
) -> SGLangEngine:
    """Make one engine with a server on this machine, not started; its log is RUN_DIR/logs/engine-INDEX.log.

    Raises ConfigError for options that the installed SGLang does not have.
    """
    config = plan.config
    max_positions = config.rollout.max_context_len or plan.layout.max_positions
    arguments = server_arguments(
        model_path=plan.model_path,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        max_positions=max_positions,
        max_running_requests=config.engine.max_running_requests,
        tensor_parallel=config.engine.gpus_per_engine,
        seed=config.run.seed,
        trust_remote_code=config.model.trust_remote_code,
        options=config.engine.options,
    )
    said = 0.0

    def on_wait(seconds: float) -> None:
        nonlocal said
        if seconds < said:
            said = 0.0  # another start
        if seconds - said >= PROGRESS_SECONDS:
            said = seconds
            click.echo(f"engine {index}: starting, {seconds:.0f} s", err=True)

    log_path = plan.run_dir / "logs" / f"engine-{index}.log"
    environment = {} if config.run.threads is None else {"OMP_NUM_THREADS": str(config.run.threads)}
    return SGLangEngine(
        SGLangServer(arguments, log_path=log_path, environment=environment, on_wait=on_wait),
        decode=tokenizer.decode,
        end_token_ids=tokenizer.end_token_ids,
        vocab_size=plan.layout.vocab_size,
        max_positions=max_positions,
        index=index,
        seeded=bool(arguments.get("enable_deterministic_inference")),
    )


@asynccontextmanager
async def inline_sglang(
    plan: Plan, tokenizer: Tokenizer, trainer: Trainer, device: torch.device, dtype: torch.dtype
) -> AsyncIterator[tuple[EnginePool, Sender]]:
    """Start servers beside the trainer of this process; give their pool and the sender of its weights."""
    config = plan.config
    count = config.engine.num_engines or 1
    engines = [build_sglang_engine(plan, tokenizer, device, dtype, index) for index in range(count)]
    pool = EnginePool(engines, on_event=lambda text: click.echo(text, err=True))
    await pool.start()
    try:
        here = trainer.world.ranks[0]
        infos = [
            EngineInfo(engine.index, engine.endpoint, (here.device,), config.engine.gpus_per_engine, node=here.node)
            for engine in engines
        ]
        transport: Transport = plan.transport.build()
        address = replace(transport.open(trainer.world, infos), verify=plan.config.transport.verify)
        sender = transport.sender(address, rank=0)

        def refill(index: int) -> PushReport:
            if pool.version < 0:
                raise RunError(f"engine {index} was lost before the first push")
            trainer.onload("actor", WEIGHTS)
            report = sender.push(pool.version, trainer.source("actor"), [index])
            if config.trainer.offload:
                trainer.offload("actor", WEIGHTS)
            return report

        # In a thread: the other engines' answers are read meanwhile.
        pool.refill = lambda index: asyncio.to_thread(refill, index)
        yield pool, PoolSender(sender, pool)
    finally:
        await pool.stop()
