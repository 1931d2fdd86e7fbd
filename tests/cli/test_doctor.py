"""`milepost doctor`: what it says of environments that go together and of those that do not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from milepost.doctor import Facts, Finding, Gpu, collect, examine, parse_gpus, release

H200 = Gpu("NVIDIA H200", 140 * 2**30, 2**30)
LAPTOP = Facts(python=(3, 11), versions={"torch": "2.13.0+cpu", "transformers": "5.12.1"}, shm_free_bytes=8 * 2**30)
NODE = Facts(
    python=(3, 12),
    versions={
        "torch": "2.11.0+cu130",
        "transformers": "5.12.1",
        "sglang": "0.5.17",
        "sglang-kernel": "0.4.5",
        "flashinfer-python": "0.6.15.post1",
        "torch-memory-saver": "0.0.9",
        "megatron-core": "0.16.1",
        "ray": "2.60.0",
        "aiohttp": "3.14.5",
        "nvidia-nccl-cu13": "2.28.9",
    },
    pins={"torch": "2.11.0", "transformers": "5.12.1", "sglang-kernel": "0.4.5", "flashinfer-python": "0.6.15.post1"},
    torch_cuda="13.0",
    gpus=(H200, H200),
    driver="580.95.05",
    shm_free_bytes=64 * 2**30,
    disk_free_bytes={"/runs": 900 * 2**30},
    rdma_devices=("mlx5_0",),
    has_ibverbs=True,
)


def problems(facts: Facts) -> list[Finding]:
    return [finding for finding in examine(facts) if finding.level != "ok"]


def with_versions(facts: Facts, **versions: str | None) -> Facts:
    changed = {name.replace("_", "-"): version for name, version in versions.items()}
    kept = {name: version for name, version in facts.versions.items() if name not in changed}
    return replace(facts, versions={**kept, **{n: v for n, v in changed.items() if v is not None}})


def test_a_laptop_and_a_node_that_are_in_order_have_no_problem() -> None:
    assert [finding for finding in problems(LAPTOP) if finding.level == "problem"] == []
    assert problems(NODE) == []
    messages = [finding.message for finding in examine(NODE)]
    assert "2 x NVIDIA H200, driver 580.95.05" in messages
    assert "torch 2.11.0+cu130, built for CUDA 13.0" in messages


@pytest.mark.parametrize(
    ("facts", "topic", "message", "remedy"),
    [
        (replace(LAPTOP, python=(3, 10)), "python", "Python 3.10; milepost needs 3.11", "newer Python"),
        (with_versions(LAPTOP, torch=None), "torch", "torch is not installed", "scripts/setup.py"),
        (with_versions(LAPTOP, torch="2.10.1"), "torch", "expected 2.11 to 2.13", "install torch 2.11 to 2.13"),
        (with_versions(LAPTOP, torch="2.14.0"), "torch", "torch 2.14.0; expected", "install torch"),
        (replace(NODE, torch_cuda=None), "torch", "is a CPU build, but there is a GPU (NVIDIA H200)", "CUDA build"),
        (with_versions(LAPTOP, torchvision="0.29.1"), "torch", "torchvision 0.29.1 belongs to another", "0.28"),
        (with_versions(LAPTOP, transformers=None), "transformers", "not installed", "milepost[torch]"),
        (with_versions(NODE, transformers="5.17.0"), "transformers", "needs exactly 5.12.1", "transformers==5.12.1"),
        (with_versions(NODE, torch="2.13.0"), "sglang", "needs torch 2.11.0, installed is 2.13.0", "torch==2.11.0"),
        (with_versions(NODE, sglang_kernel=None), "sglang", "needs sglang-kernel 0.4.5, installed is none", "0.4.5"),
        (
            with_versions(NODE, sglang_kernel="0.4.1"),
            "sglang",
            "needs sglang-kernel 0.4.5, installed is 0.4.1",
            "0.4.5",
        ),
        (replace(NODE, gpus=(), driver=None, torch_cuda=None, gpu_error="it hangs"), "gpu", "it hangs", "dmesg"),
        (with_versions(NODE, aiohttp=None), "sglang", "aiohttp is not installed", "pip install aiohttp"),
        (
            with_versions(NODE, torch_memory_saver=None),
            "memory saver",
            "torch_memory_saver is not",
            "torch_memory_saver",
        ),
        (
            replace(NODE, environment={"PYTORCH_CUDA_ALLOC_CONF": "a:b,expandable_segments:True"}),
            "memory saver",
            "expandable segments",
            "unset PYTORCH_CUDA_ALLOC_CONF",
        ),
        (with_versions(LAPTOP, megatron_core="0.17.0"), "megatron", "needs Python 3.12", "megatron-core==0.16.1"),
        (with_versions(NODE, ray="2.49.1"), "ray", "Ray 2.49.1; expected 2.50", "ray>=2.50"),
        (replace(NODE, driver="550.54"), "gpu", "driver 550.54 is too old for torch's CUDA 13.0", "update the driver"),
        (with_versions(NODE, nvidia_nccl_cu12="2.27.3"), "nccl", "overwrite each other", "reinstall torch"),
        (replace(LAPTOP, shm_free_bytes=64 * 2**20), "shared memory", "64 MiB free", "--ipc=host"),
        (replace(LAPTOP, shm_free_bytes=None), "shared memory", "no /dev/shm", "--shm-size"),
        (replace(LAPTOP, loopback_error="refused"), "ports", "can be listened on: refused", "loopback"),
        (
            replace(
                NODE,
                versions={**NODE.versions, "mooncake-transfer-engine": "0.3"},
                missing_libraries=("librdmacm.so.1",),
            ),
            "mooncake",
            "not what it needs: librdmacm.so.1;",
            "apt-get install libibverbs1 librdmacm1",
        ),
        (replace(NODE, has_ibverbs=False), "rdma", "mlx5_0), but libibverbs", "apt-get install libibverbs1"),
    ],
)
def test_what_does_not_go_together_is_a_problem_with_its_remedy(
    facts: Facts, topic: str, message: str, remedy: str
) -> None:
    [found] = [finding for finding in examine(facts) if finding.level == "problem"]
    assert found.topic == topic
    assert message in found.message
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (with_versions(NODE, sglang="0.6.0"), "SGLang 0.6.0; milepost is tested with 0.5.17"),
        (with_versions(NODE, megatron_core="0.17.0"), "Megatron-core 0.17.0; milepost is tested with 0.16.1"),
        (replace(NODE, gpus=(H200, replace(H200, used_bytes=70 * 2**30))), "GPU 1 has 70 of 140 GiB in use"),
        (replace(NODE, disk_free_bytes={"/runs": 2**30}), "/runs has 1.0 GiB free"),
        (replace(NODE, open_files=256), "a process may open 256 files"),
        (replace(NODE, host_error="node7: unknown"), "this machine's name has no address: node7: unknown"),
    ],
)
def test_what_may_become_trouble_is_a_note(facts: Facts, message: str) -> None:
    [found] = problems(facts)
    assert found.level == "note"
    assert found.message.startswith(message)
    assert found.remedy


def test_nvidia_smi_is_read() -> None:
    listing = "NVIDIA H200, 143771, 4, 580.95.05\nNVIDIA GB10, [N/A], [N/A], 580.95.05\n"
    gpus, driver = parse_gpus(listing)
    assert gpus == (Gpu("NVIDIA H200", 143771 * 2**20, 4 * 2**20), Gpu("NVIDIA GB10", 0, 0))
    assert driver == "580.95.05"
    assert parse_gpus("") == ((), None)


def test_versions_are_compared_by_their_first_two_numbers() -> None:
    assert [release(text) for text in ("2.13.0+cpu", "0.6.15.post1", "12.8")] == [(2, 13), (0, 6), (12, 8)]


def test_this_environment_is_seen_as_it_is(tmp_path: Path) -> None:
    facts = collect(tmp_path)
    assert facts.python == sys.version_info[:2]
    assert facts.versions["torch"] == torch.__version__
    assert facts.versions["transformers"] == metadata.version("transformers")
    assert facts.torch_cuda == torch.version.cuda
    assert str(tmp_path) in facts.disk_free_bytes


def test_the_command_prints_findings_or_data_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from milepost.cli import cli\n"
        "for form in ([], ['--json']):\n"
        f"    print(CliRunner().invoke(cli, ['doctor', '--folder', {str(tmp_path)!r}, *form]).output)\n"
        "    print('---')\n"
        "print([name for name in ('torch', 'transformers', 'ray', 'sglang.srt') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, data, imported = done.stdout.split("---\n")
    assert f"torch {torch.__version__}" in text
    assert text.strip().splitlines()[-1].endswith(("problem", "problems"))
    assert imported.strip() == "[]"
    report = json.loads(data)
    assert report["facts"]["versions"]["torch"] == torch.__version__
    assert {finding["level"] for finding in report["findings"]} <= {"ok", "note", "problem"}


def test_a_problem_makes_the_exit_code_1(tmp_path: Path) -> None:
    code = (
        "import milepost.doctor, sys\n"
        "milepost.doctor.SHM_BYTES = 2**60\n"
        "from click.testing import CliRunner\n"
        "from milepost.cli import cli\n"
        f"sys.exit(CliRunner().invoke(cli, ['doctor', '--folder', {str(tmp_path)!r}]).exit_code)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
