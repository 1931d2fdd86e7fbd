"""What is installed here and what the machine has, and whether it goes together: `milepost doctor`.

`collect` looks, `examine` judges; between them stands `Facts`, plain data. Nothing heavy is imported: versions come
from package metadata, GPUs from nvidia-smi.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Final, Literal

Level = Literal["ok", "note", "problem"]

MOONCAKE: Final = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")

DISTRIBUTIONS: Final = (
    *("torch", "torchvision", "transformers", "tokenizers", "sglang", "sglang-kernel", "flashinfer-python"),
    *("torch-memory-saver", "megatron-core", "transformer-engine", "ray", "aiohttp", "nvidia-nccl-cu12"),
    "nvidia-nccl-cu13",
    *MOONCAKE,
)
"""Distributions whose versions matter."""

MOONCAKE_LIBRARIES: Final = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1", "liburing.so.2", "libcurl.so.4")
"""What Mooncake's transfer engine loads of the system's."""

TESTED: Final[Mapping[str, str]] = {"sglang": "0.5.17", "megatron-core": "0.16.1"}
"""Versions whose inside milepost relies on; others may work."""

TORCH: Final = ((2, 11), (2, 14))
"""First version of torch that serves, and the first that is too new."""

RAY: Final = (2, 50)
DRIVERS: Final[Mapping[int, int]] = {12: 525, 13: 580}
"""Major version of CUDA to the least major version of the driver (NVIDIA, CUDA compatibility)."""

SHM_BYTES: Final = 2**30
DISK_BYTES: Final = 20 * 2**30
OPEN_FILES: Final = 4096
BUSY_SHARE: Final = 0.1
"""Share of a GPU's memory that others may hold before it is worth saying."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi lists it."""

    name: str
    memory_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What there is."""

    python: tuple[int, int]
    versions: Mapping[str, str]
    """Installed distributions of `DISTRIBUTIONS`."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """What the installed SGLang requires exactly: distribution to version."""
    torch_cuda: str | None = None
    """CUDA version torch was built for; None for a CPU build or no torch."""
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    gpu_error: str | None = None
    """Why the driver could not be asked for GPUs."""
    shm_free_bytes: int | None = None
    """None where there is no /dev/shm."""
    disk_free_bytes: Mapping[str, int] = field(default_factory=dict)
    """Folder to bytes free."""
    open_files: int = OPEN_FILES
    loopback_error: str | None = None
    """Why no port on 127.0.0.1 can be listened on."""
    host_error: str | None = None
    """Why this machine's name has no address."""
    rdma_devices: tuple[str, ...] = ()
    has_ibverbs: bool = False
    missing_libraries: tuple[str, ...] = ()
    """Of `MOONCAKE_LIBRARIES`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that change how things behave."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    level: Level
    message: str
    remedy: str = ""
    """What to do; empty where nothing needs to be done."""


SMI_SECONDS: Final = 60.0
LIBRARY_FOLDERS: Final = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
WATCHED_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")


def collect(folder: Path) -> Facts:
    """Look at this environment and machine; `folder` is where runs are written."""
    gpus, driver, gpu_error = _gpus()
    verbs = Path("/sys/class/infiniband")
    shm = Path("/dev/shm")
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor),
        versions=dict(_versions()),
        pins=_sglang_pins(),
        torch_cuda=_torch_cuda(),
        gpus=gpus,
        driver=driver,
        gpu_error=gpu_error,
        shm_free_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        disk_free_bytes={str(path): shutil.disk_usage(path).free for path in (folder, Path(tempfile.gettempdir()))},
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        loopback_error=_loopback_error(),
        host_error=_host_error(),
        rdma_devices=tuple(sorted(path.name for path in verbs.iterdir())) if verbs.is_dir() else (),
        missing_libraries=tuple(name for name in MOONCAKE_LIBRARIES if not _has_library(name)),
        has_ibverbs=_has_library("libibverbs.so.1"),
        environment={name: os.environ[name] for name in WATCHED_VARIABLES if name in os.environ},
    )


def examine(facts: Facts) -> list[Finding]:
    """Judge what there is, topic by topic."""
    checks = (_python, _torch, _transformers, _sglang, _memory_saver, _megatron, _ray, _gpu, _nccl, _shm, _network)
    return [finding for check in (*checks, _rdma, _mooncake, _disk, _files) for finding in check(facts)]


# Versions


def _python(facts: Facts) -> Iterator[Finding]:
    shown = ".".join(map(str, facts.python))
    if facts.python < (3, 11):
        yield Finding("python", "problem", f"Python {shown}; milepost needs 3.11 or newer", "use a newer Python")
    else:
        yield Finding("python", "ok", f"Python {shown}")


def _torch(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.get("torch")
    if version is None:
        yield Finding("torch", "problem", "torch is not installed; nothing can be trained", "make, or scripts/setup.py")
        return
    low, high = TORCH
    expected = f"{low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"
    if not low <= release(version) < high:
        yield Finding("torch", "problem", f"torch {version}; expected {expected}", f"install torch {expected}")
    elif facts.gpus and facts.torch_cuda is None:
        yield Finding(
            "torch",
            "problem",
            f"torch {version} is a CPU build, but there is a GPU ({facts.gpus[0].name})",
            "reinstall torch as a CUDA build: pip install --force-reinstall torch, without the +cpu suffix",
        )
    elif not facts.gpus and facts.torch_cuda is not None:
        yield Finding("torch", "note", f"torch {version} is built for CUDA {facts.torch_cuda}, but no GPU is visible")
    else:
        yield Finding("torch", "ok", f"torch {version}, {_build(facts.torch_cuda)}")
    vision = facts.versions.get("torchvision")
    # torchvision 0.(n + 15) belongs to torch 2.n since 2.0.
    if vision is not None and release(vision) != (0, release(version)[1] + 15):
        wanted = f"0.{release(version)[1] + 15}"
        yield Finding(
            "torch",
            "problem",
            f"torchvision {vision} belongs to another torch than {version}, and transformers fails to import with it",
            f"install torchvision {wanted} of the same build"
            + ("" if "sglang" in facts.versions else ", or uninstall it: milepost does not need it"),
        )


def _transformers(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.get("transformers")
    if version is None:
        yield Finding("transformers", "problem", "transformers is not installed", "pip install 'milepost[torch]'")
        return
    wanted = facts.pins.get("transformers")
    if wanted is not None and version != wanted:
        yield Finding(
            "transformers",
            "problem",
            f"transformers {version}, but SGLang {facts.versions['sglang']} needs exactly {wanted}",
            f"pip install transformers=={wanted}",
        )
    else:
        yield Finding("transformers", "ok", f"transformers {version}")


def _sglang(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.get("sglang")
    if version is None:
        remedy = "pip install 'milepost[sglang]'" if facts.gpus else ""
        yield Finding("sglang", "note", "SGLang is not installed; engine.backend: local generates", remedy)
        return
    if version != TESTED["sglang"]:
        yield Finding(
            "sglang",
            "note",
            f"SGLang {version}; milepost is tested with {TESTED['sglang']} and relies on its routes and weight loaders",
            f"pip install sglang=={TESTED['sglang']} if engines misbehave",
        )
    else:
        yield Finding("sglang", "ok", f"SGLang {version}")
    if "aiohttp" not in facts.versions:
        yield Finding(
            "sglang", "problem", "aiohttp is not installed; engines are reached with it", "pip install aiohttp"
        )
    if not facts.gpus:
        yield Finding(
            "sglang", "ok", "no GPU: SGLang decodes on the CPU in plain torch, with stand-ins for its kernels"
        )
        return
    for name in ("torch", "sglang-kernel", "flashinfer-python"):
        wanted, installed = facts.pins.get(name), facts.versions.get(name)
        if wanted is not None and (installed is None or installed.partition("+")[0] != wanted):
            yield Finding(
                "sglang",
                "problem",
                f"SGLang {version} needs {name} {wanted}, installed is {installed or 'none'}; its kernels are binary",
                f"pip install {name}=={wanted}",
            )


def _memory_saver(facts: Facts) -> Iterator[Finding]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*true", facts.environment.get(name, ""), re.IGNORECASE):
            yield Finding(
                "memory saver",
                "problem",
                f"{name} turns expandable segments on; such memory cannot be handed to an engine (transport ipc)",
                f"unset {name}",
            )
    if "sglang" not in facts.versions or not facts.gpus:
        return
    version = facts.versions.get("torch-memory-saver")
    if version is None:
        yield Finding(
            "memory saver",
            "problem",
            "torch_memory_saver is not installed; colocated engines cannot give their memory to the trainer",
            "pip install torch_memory_saver",
        )
    else:
        yield Finding("memory saver", "ok", f"torch_memory_saver {version}")


def _megatron(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.get("megatron-core")
    if version is None:
        yield Finding("megatron", "note", "Megatron-core is not installed; trainer.backend: torch trains")
    elif release(version) >= (0, 17) and facts.python < (3, 12):
        yield Finding(
            "megatron",
            "problem",
            f"Megatron-core {version} needs Python 3.12, this is {'.'.join(map(str, facts.python))}",
            f"pip install megatron-core=={TESTED['megatron-core']}",
        )
    elif version != TESTED["megatron-core"]:
        yield Finding(
            "megatron",
            "note",
            f"Megatron-core {version}; milepost is tested with {TESTED['megatron-core']}",
            f"pip install megatron-core=={TESTED['megatron-core']} if training misbehaves",
        )
    else:
        engine = facts.versions.get("transformer-engine")
        beside = f" with Transformer Engine {engine}" if engine else ", without Transformer Engine (its own layers)"
        yield Finding("megatron", "ok", f"Megatron-core {version}{beside}")


def _ray(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.get("ray")
    if version is None:
        yield Finding("ray", "note", "Ray is not installed; cluster.launcher: inline runs in one process")
    elif release(version) < RAY:
        oldest = ".".join(map(str, RAY))
        yield Finding("ray", "problem", f"Ray {version}; expected {oldest} or newer", f"pip install 'ray>={oldest}'")
    else:
        yield Finding("ray", "ok", f"Ray {version}; all machines of a cluster need the same")


# GPUs


def _gpu(facts: Facts) -> Iterator[Finding]:
    if facts.gpu_error is not None:
        remedy = "see `dmesg` for the driver's errors; a reload of the driver or a restart of the machine may help"
        yield Finding("gpu", "problem", facts.gpu_error, remedy)
        return
    if not facts.gpus:
        yield Finding("gpu", "note", "no GPU is visible (nvidia-smi lists none); everything runs on the CPU")
        return
    names = ", ".join(f"{facts.gpus.count(gpu)} x {gpu.name}" for gpu in dict.fromkeys(facts.gpus))
    yield Finding("gpu", "ok", f"{names}, driver {facts.driver}")
    for index, gpu in enumerate(facts.gpus):
        if gpu.used_bytes > BUSY_SHARE * gpu.memory_bytes:
            used, total = gpu.used_bytes / 2**30, gpu.memory_bytes / 2**30
            yield Finding(
                "gpu",
                "note",
                f"GPU {index} has {used:.0f} of {total:.0f} GiB in use already",
                "see `nvidia-smi` for whose it is; an engine left over from a killed run can be ended",
            )
    if facts.torch_cuda is not None and facts.driver is not None:
        needed = DRIVERS.get(release(facts.torch_cuda)[0])
        if needed is not None and release(facts.driver)[0] < needed:
            yield Finding(
                "gpu",
                "problem",
                f"driver {facts.driver} is too old for torch's CUDA {facts.torch_cuda}, which needs {needed} or newer",
                "update the driver, or install a torch that was built for an older CUDA",
            )


def _nccl(facts: Facts) -> Iterator[Finding]:
    found = {name: facts.versions[name] for name in facts.versions if name.startswith("nvidia-nccl")}
    if len(found) > 1:
        shown = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
        yield Finding(
            "nccl",
            "problem",
            f"{shown} are both installed and overwrite each other's files",
            "uninstall both, then reinstall torch, which brings its own",
        )
    elif found:
        yield Finding("nccl", "ok", f"NCCL {next(iter(found.values()))}")


# The machine


def _shm(facts: Facts) -> Iterator[Finding]:
    free = facts.shm_free_bytes
    remedy = "in a container: docker run --ipc=host, or --shm-size=16g"
    if free is None:
        yield Finding(
            "shared memory", "problem", "there is no /dev/shm; weights are handed over in it on a CPU", remedy
        )
    elif free < SHM_BYTES:
        message = f"/dev/shm has {free / 2**20:.0f} MiB free; weights, NCCL and Ray need at least 1 GiB"
        yield Finding("shared memory", "problem", message, remedy)
    else:
        yield Finding("shared memory", "ok", f"/dev/shm has {free / 2**30:.1f} GiB free")


def _network(facts: Facts) -> Iterator[Finding]:
    if facts.loopback_error is not None:
        yield Finding(
            "ports",
            "problem",
            f"no port on 127.0.0.1 can be listened on: {facts.loopback_error}",
            "allow processes to listen on loopback; engines and ranks talk over it",
        )
    else:
        yield Finding("ports", "ok", "free ports on loopback")
    if facts.host_error is not None:
        yield Finding(
            "ports",
            "note",
            f"this machine's name has no address: {facts.host_error}",
            "add it to /etc/hosts before using several machines",
        )


def _rdma(facts: Facts) -> Iterator[Finding]:
    if not facts.rdma_devices:
        yield Finding("rdma", "note", "no RDMA device; machines exchange weights over TCP")
    elif not facts.has_ibverbs:
        yield Finding(
            "rdma",
            "problem",
            f"RDMA devices ({', '.join(facts.rdma_devices)}), but libibverbs is not installed",
            "apt-get install libibverbs1 librdmacm1 ibverbs-providers",
        )
    else:
        yield Finding("rdma", "ok", f"RDMA devices {', '.join(facts.rdma_devices)}")


def _mooncake(facts: Facts) -> Iterator[Finding]:
    if not facts.versions.keys() & set(MOONCAKE):
        return  # only transport p2p needs it, and says so
    if facts.missing_libraries:
        yield Finding(
            "mooncake",
            "problem",
            f"Mooncake is installed, but not what it needs: {', '.join(facts.missing_libraries)}; transport p2p fails",
            "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4",
        )
    else:
        found = next(f"{name} {facts.versions[name]}" for name in MOONCAKE if name in facts.versions)
        yield Finding("mooncake", "ok", found)


def _has_library(name: str) -> bool:
    return any(True for folder in LIBRARY_FOLDERS for _ in Path(folder).glob(f"**/{name}*"))


def _disk(facts: Facts) -> Iterator[Finding]:
    for folder, free in facts.disk_free_bytes.items():
        if free < DISK_BYTES:
            message = f"{folder} has {free / 2**30:.1f} GiB free; a checkpoint takes about 16 bytes a parameter"
            yield Finding("disk", "note", message, "free some, lower checkpoint.keep, or give another run.dir")
        else:
            yield Finding("disk", "ok", f"{folder} has {free / 2**30:.0f} GiB free")


def _files(facts: Facts) -> Iterator[Finding]:
    if facts.open_files < OPEN_FILES:
        message = f"a process may open {facts.open_files} files; each running request takes one"
        yield Finding("open files", "note", message, "ulimit -n 65536")
    else:
        yield Finding("open files", "ok", f"a process may open {facts.open_files} files")


def _build(cuda: str | None) -> str:
    return "CPU build" if cuda is None else f"built for CUDA {cuda}"


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: `2.13.0+cpu` is (2, 13)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2])


# Looking


def _versions() -> Iterator[tuple[str, str]]:
    for name in DISTRIBUTIONS:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _sglang_pins() -> dict[str, str]:
    try:
        requirements = metadata.requires("sglang") or []
    except metadata.PackageNotFoundError:
        return {}
    pins = {}
    for text in requirements:
        exact = re.fullmatch(r"([\w.-]+)(?:\[[^]]*\])?==([\w.]+)", text.strip())
        if exact is not None:
            pins[exact[1].replace("_", "-").lower()] = exact[2]
    return pins


def _torch_cuda() -> str | None:
    """Read which CUDA torch was built for out of its version file."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b.*=\s*'([\d.]+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def _gpus() -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """Ask nvidia-smi for the GPUs and the driver; the third says why it could not be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), None, None
    query = "--query-gpu=name,memory.total,memory.used,driver_version"
    asked = [program, query, "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return (), None, f"nvidia-smi did not answer within {SMI_SECONDS:g} s: the driver hangs"
    return *parse_gpus(listing.stdout if listing.returncode == 0 else ""), None


def parse_gpus(listing: str) -> tuple[tuple[Gpu, ...], str | None]:
    """Parse `name, memory.total, memory.used, driver_version` in MiB, a line for each GPU."""
    rows: Sequence[Sequence[str]] = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    gpus = tuple(Gpu(row[0], _mib(row[1]), _mib(row[2])) for row in rows if len(row) == 4)
    return gpus, rows[0][3] if gpus else None


def _mib(text: str) -> int:
    return int(text) * 2**20 if text.isdigit() else 0  # `[N/A]` on some machines


def _loopback_error() -> str | None:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
    except OSError as error:
        return str(error)
    return None


def _host_error() -> str | None:
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return f"{socket.gethostname()}: {error}"
    return None
