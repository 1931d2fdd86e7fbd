"""Set up milepost's virtual environment: torch first, in the right build, then milepost with the wanted extras.

    python3 scripts/setup.py --extras torch [--dev] [--venv .venv]

Needs nothing but Python 3.11 or newer; the Makefile looks for one. On Linux the default build of torch brings gigabytes
of CUDA libraries, so without an NVIDIA GPU the CPU build is installed: from the package index pip is configured for if
that has it, otherwise from --torch-index. If neither has it the setup stops, rather than falling back to CUDA.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
GROUPS_SINCE = "25.1"
"""First pip that knows `--group`."""


def torch_requirement(version: str, system: str, has_gpu: bool) -> str:
    """The requirement that selects the right build of torch.

    Wheels for Linux carry the build in their version (`2.13.0+cpu`); those for macOS and Windows are CPU builds.
    """
    return f"torch=={version}+cpu" if system == "Linux" and not has_gpu else f"torch=={version}"


def pinned_torch(constraints: str) -> str:
    """The torch version that the constraints file pins. Raises ValueError where it pins none."""
    match = re.search(r"^torch==([\w.]+)$", constraints, re.MULTILINE)
    if match is None:
        raise ValueError(f"{CONSTRAINTS} has no line `torch==VERSION`; add one")
    return match[1]


def has_nvidia_gpu() -> bool:
    """Whether `nvidia-smi` is there and lists a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    listing = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


class Environment:
    """A virtual environment and its pip."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        if not self.python.exists():
            print(f"setup: creating {folder}", flush=True)
            venv.create(folder, with_pip=True)

    def pip(self, *arguments: str, quiet_failure: bool = False) -> bool:
        """Run pip; False if it failed and the caller expects that it may, otherwise a failure ends the setup."""
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]
        output = subprocess.PIPE if quiet_failure else None
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
        if code and not quiet_failure:
            sys.exit(f"setup: `pip {' '.join(arguments)}` failed (exit {code}); see pip's message above")
        return code == 0

    def install(self, *arguments: str) -> None:
        """Install within the constraints."""
        self.pip("install", "--quiet", "--constraint", str(CONSTRAINTS), *arguments)

    def install_torch(self, index: str) -> None:
        """Install torch, as a CPU build unless there is a GPU."""
        version = pinned_torch(CONSTRAINTS.read_text(encoding="utf-8"))
        requirement = torch_requirement(version, platform.system(), has_nvidia_gpu())
        print(f"setup: installing {requirement}", flush=True)
        # The configured index first: a mirror may hold the build where the public index cannot be reached.
        if self.pip("install", "--quiet", requirement, quiet_failure=True):
            return
        print(f"setup: not in the configured package index; asking {index}", flush=True)
        self.pip("install", "--quiet", "--extra-index-url", index, requirement)


def main() -> None:
    """Set the environment up; running it again brings it up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="virtual environment (default: %(default)s)")
    parser.add_argument("--extras", default="torch", help="milepost extras, with commas (default: %(default)s)")
    parser.add_argument("--dev", action="store_true", help="install the tools of `make test` and `make check` too")
    parser.add_argument("--torch-index", default=TORCH_INDEX, help="index of CPU builds (default: %(default)s)")
    given = parser.parse_args()

    environment = Environment(given.venv)
    environment.pip("install", "--quiet", "--upgrade", f"pip>={GROUPS_SINCE}")
    environment.install_torch(given.torch_index)
    print(f"setup: installing milepost[{given.extras}]", flush=True)
    environment.install("--editable", f"{ROOT}[{given.extras}]")
    if given.dev:
        print("setup: installing the development tools", flush=True)
        environment.install("--group", f"{ROOT / 'pyproject.toml'}:dev")
    print(f"setup: {given.venv} is ready", flush=True)


if __name__ == "__main__":
    main()
