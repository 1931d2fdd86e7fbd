#!/usr/bin/env bash
# Install SGLang for a CPU into an environment that has milepost[torch]: scripts/install_sglang_cpu.sh [PYTHON]
#
# SGLang's own requirements pin a CUDA build of torch and a dozen packages of GPU kernels, and its kernels for CPUs are
# built for AMX machines alone. So it is installed without them, with what its CPU engine imports; what it imports and
# does not use is stood in for by core/milepost/rollout/sglang/cpu. torch and transformers stay as they are.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${1:-$root/.venv/bin/python}"
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

"$python" -c 'import torch, transformers, milepost' || {
    echo "install_sglang_cpu: $python has no torch, transformers and milepost; run scripts/setup.py --extras torch first" >&2
    exit 1
}

# Imported by SGLang's HTTP server, scheduler, tokenizer and detokenizer.
pip install --quiet --constraint "$root/constraints.txt" \
    accelerate aiohttp apache-tvm-ffi dill einops fastapi gguf interegular jsonschema loguru msgspec openai==2.6.1 \
    orjson partial_json_parser pillow prometheus-client psutil pybase64 python-multipart pyzmq requests scipy \
    sentencepiece setproctitle soundfile tiktoken uvicorn uvloop xxhash zstandard
# These require torch builds or kernels of their own choice.
pip install --quiet --no-deps sglang==0.5.17 compressed_tensors triton xgrammar

"$python" - <<'PYTHON'
import subprocess, sys
from milepost.rollout.sglang.server import server_environment

check = [sys.executable, "-c", "import sglang.srt.entrypoints.http_server"]
sys.exit(subprocess.run(check, env=server_environment("cpu"), check=False).returncode)
PYTHON
echo "install_sglang_cpu: SGLang $("$python" -c 'from importlib.metadata import version; print(version("sglang"))') is ready"
