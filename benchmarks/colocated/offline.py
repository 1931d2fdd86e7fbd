"""SGLang's own offline engine on the requests of one rollout of a run config: `python offline.py RUN.yaml`.

The arguments of the engine, the sampling parameters and the log-probs asked for are those milepost's engine uses. It is
to be started with `milepost.rollout.sglang.server.server_environment`.
Prints one JSON line: sampled tokens, seconds and tokens per second of the second of two passes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    from milepost.assembly import training_params
    from milepost.cluster.building import choose_device, choose_dtype
    from milepost.config.loading import load_config
    from milepost.config.plan import make_plan
    from milepost.data import load_dataset
    from milepost.rollout.sglang.engine import SGLangEngine
    from milepost.rollout.sglang.options import server_arguments
    from milepost.rollout.sglang.server import SGLangServer
    from milepost.tokenizer import load_tokenizer

    plan = make_plan(load_config([Path(sys.argv[1])], []))
    config = plan.config
    device = choose_device(config.run.device)
    tokenizer = load_tokenizer(plan.model_path, trust_remote_code=False)
    max_positions = config.rollout.max_context_len or plan.layout.max_positions
    arguments = server_arguments(
        model_path=plan.model_path,
        device=device.type,
        dtype=str(choose_dtype(config.model.dtype, device)).removeprefix("torch."),
        max_positions=max_positions,
        max_running_requests=config.engine.max_running_requests,
        seed=config.run.seed,
        options=config.engine.options,
    )
    engine = SGLangEngine(  # never started: it says how requests are made
        SGLangServer(arguments, log_path=plan.run_dir / "logs" / "offline.log"),
        decode=tokenizer.decode,
        end_token_ids=tokenizer.end_token_ids,
        vocab_size=plan.layout.vocab_size,
        max_positions=max_positions,
    )
    tasks = load_dataset(config.data.path, config.data, tokenizer).tasks[: plan.batch_size]
    params = training_params(plan)
    bodies = [
        engine.request_body(task.tokens, params, (task.index, sample))
        for task in tasks
        for sample in range(plan.samples_per_prompt)
    ]

    import sglang

    alone = sglang.Engine(**arguments)
    try:
        for _ in range(2):
            started = time.perf_counter()
            answers = alone.generate(
                input_ids=[body["input_ids"] for body in bodies],
                sampling_params=[body["sampling_params"] for body in bodies],
                return_logprob=True,
                logprob_start_len=-1,
            )
            elapsed = time.perf_counter() - started
    finally:
        alone.shutdown()
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    print(json.dumps({"tokens": tokens, "seconds": elapsed, "tokens_per_second": tokens / elapsed}))


if __name__ == "__main__":
    main()
