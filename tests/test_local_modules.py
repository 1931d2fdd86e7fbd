from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

from milepost.registry import Registry
from plugin_site import reward, states


def test_a_hook_module_beside_the_run_config_is_a_plugin(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(reward("mine")))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    registry = Registry.load(modules=["mine", "mine"], base_dir=tmp_path, discover=list)
    (record,) = registry.plugins
    assert (record.name, record.distribution, record.state, record.digest) == ("mine", "local", "ok", digest)
    assert registry.get("reward", "mine").origin == f"local:mine.py ({digest})"
    assert registry.distributions() == {"local:mine": digest}
    assert "mine" not in sys.modules
    assert states(Registry.load(modules=["mine"], base_dir=tmp_path, block=["local:mine"], discover=list)) == {
        "local:mine": "blocked"
    }


def test_loading_a_local_module_again_gives_the_same_classes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(reward("mine")))
    first, second = (Registry.load(modules=["mine"], base_dir=tmp_path, discover=list) for _ in range(2))
    assert first.get("reward", "mine").component.options is second.get("reward", "mine").component.options


def test_an_edited_local_module_is_never_taken_from_a_stale_cache(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    digests = []
    for name in ("one", "two"):
        file.write_text(textwrap.dedent(reward(name)))
        os.utime(file, (1_000_000_000, 1_000_000_000))
        registry = Registry.load(modules=["mine"], base_dir=tmp_path, discover=list)
        assert registry.names("reward") == [name]
        digests.append(registry.plugins[0].digest)
    assert digests[0] != digests[1]


def test_a_local_package_has_relative_imports_and_a_hash_of_all_its_source(tmp_path: Path) -> None:
    package = tmp_path / "ours"
    package.mkdir()
    (package / "__init__.py").write_text(
        textwrap.dedent(reward("ours")).replace(
            "Constant(options.scale)", "__import__('importlib').import_module('.heavy', __package__).make()"
        )
    )
    (package / "heavy.py").write_text("def make():\n    return 'heavy one'\n")
    first = Registry.load(modules=["ours"], base_dir=tmp_path, discover=list)
    assert first.resolve("reward", "ours") == "heavy one"
    (package / "heavy.py").write_text("def make():\n    return 'heavier two'\n")
    second = Registry.load(modules=["ours"], base_dir=tmp_path, discover=list)
    assert second.resolve("reward", "ours") == "heavier two"
    assert first.plugins[0].digest != second.plugins[0].digest
    assert second.get("reward", "ours").origin == f"local:ours/ ({second.plugins[0].digest})"


def test_a_local_module_that_cannot_be_had_says_why(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('no')")
    names = ["missing", "../escape", "bad"]
    registry = Registry.load(modules=names, base_dir=tmp_path, discover=list)
    missing, escape, bad = registry.plugins
    assert missing.error == (
        f"plugins.modules has 'missing', but there is neither {tmp_path / 'missing.py'} nor "
        f"{tmp_path / 'missing' / '__init__.py'}; create one or remove it"
    )
    assert "'../escape'; expected the name of a module" in escape.error
    assert bad.error == "ValueError: no"
    assert not [name for name in sys.modules if name.endswith("_bad") and name.startswith("_milepost_local_")]


def test_another_process_makes_the_same_registry_and_unpickles_local_options(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(reward("mine")))
    registry = Registry.load(modules=["mine"], base_dir=tmp_path, block=["local:other"])
    options = registry.get("reward", "mine").component.options(scale=2.5)
    parcel = tmp_path / "parcel"
    parcel.write_bytes(pickle.dumps((dict(registry.settings), registry.distributions(), pickle.dumps(options))))
    code = (
        "import pickle, sys; from milepost.registry import Registry\n"
        "settings, theirs, options = pickle.load(open(sys.argv[1], 'rb'))\n"
        "registry = Registry.load(**settings)\n"
        "print(registry.differences(theirs), registry.resolve('reward', 'mine', pickle.loads(options)).score(None))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(parcel)], capture_output=True, text=True, check=False, cwd=tmp_path.parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[] 2.5\n"
