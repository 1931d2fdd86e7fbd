from __future__ import annotations

import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from milepost.entry_points import Entry, find_entries, normalise


def write(info: Path, entries: str, metadata: str | None = "Name: x\nVersion: 1\n") -> None:
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text(entries)
    if metadata is not None:
        (info / ("METADATA" if info.suffix == ".dist-info" else "PKG-INFO")).write_text(metadata)


def by_importlib(group: str) -> set[Entry]:
    found = set()
    for entry in entry_points(group=group):
        assert entry.dist is not None
        found.add(Entry(entry.name, entry.value, entry.dist.name, entry.dist.version))
    return found


@pytest.mark.parametrize("group", ["milepost", "console_scripts", "pytest11", "no.such.group"])
def test_the_environment_reads_as_importlib_reads_it(group: str) -> None:
    found = list(find_entries(group))
    assert set(found) == by_importlib(group)
    assert len(found) == len(set(found))


def test_a_site_folder_reads_as_importlib_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(
        first / "acme_rewards-1.2.dist-info",
        "[console_scripts]\nmilepost-acme = acme:main\n\n[milepost]\n# a comment\nplain = acme\n"
        "spaced  =  acme.b : made \n"
        "extras = acme.c:d.e [torch]\n[milepost.other]\nnot_this = acme\n",
        "Metadata-Version: 2.1\nName: Acme.Rewards\nVersion: 1.2\nSummary: Name: not this\n\nName: nor this\n",
    )
    write(first / "old_style-0.3-py3.11.egg-info", "[milepost]\nold = old\n", "Name: old-style\nVersion: 0.3\n")
    (first / "no_entries-1.dist-info").mkdir()
    (first / "a_file.egg-info").write_text("Name: a-file\nVersion: 1\n")
    write(second / "Acme.Rewards-0.9.dist-info", "[milepost]\nshadowed = acme\n", "Name: Acme.Rewards\nVersion: 0.9\n")
    write(second / "bolt-2.dist-info", "[milepost]\nbolt = bolt\n", "Name: bolt\nVersion: 2\n")
    monkeypatch.setattr(sys, "path", [str(first), str(tmp_path / "absent"), str(second), str(first)])
    found = list(find_entries("milepost"))
    assert found == [
        Entry("plain", "acme", "Acme.Rewards", "1.2"),
        Entry("spaced", "acme.b : made", "Acme.Rewards", "1.2"),
        Entry("extras", "acme.c:d.e [torch]", "Acme.Rewards", "1.2"),
        Entry("old", "old", "old-style", "0.3"),
        Entry("bolt", "bolt", "bolt", "2"),
    ]
    assert set(found) == by_importlib("milepost")


def test_a_distribution_inside_a_zip_archive_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "site.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("zipped-3.dist-info/METADATA", "Metadata-Version: 2.1\nName: zipped\nVersion: 3\n")
        file.writestr("zipped-3.dist-info/entry_points.txt", "[milepost]\nin_zip = zipped\n")
    monkeypatch.setattr(sys, "path", [str(archive)])
    assert list(find_entries("milepost")) == [Entry("in_zip", "zipped", "zipped", "3")]


def test_a_distribution_without_metadata_is_named_after_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "bare-1.5.dist-info", "[milepost]\nbare = bare\n", metadata=None)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert list(find_entries("milepost")) == [Entry("bare", "bare", "bare", "1.5")]


def test_an_entry_loads_a_module_or_an_attribute_of_it() -> None:
    assert Entry("a", "os.path", "d", "1").load() is sys.modules["os.path"]
    assert Entry("a", "os : path.join", "d", "1").load() is sys.modules["os.path"].join
    assert Entry("a", "os:path [extra]", "d", "1").load() is sys.modules["os.path"]
    with pytest.raises(AttributeError, match="absent"):
        Entry("a", "os:absent", "d", "1").load()


def test_names_of_distributions_are_compared_in_their_normal_form() -> None:
    assert {normalise(name) for name in ("Acme.Rewards", "acme_rewards", "ACME--rewards", "acme-_.rewards")} == {
        "acme-rewards"
    }
