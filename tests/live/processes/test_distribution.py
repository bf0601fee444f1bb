"""The files of a release: the sdist and the wheel that `make dist` builds from the current sources."""

from __future__ import annotations

import configparser
import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import orderedmq

ROOT = Path(__file__).resolve().parents[3]
NAME = f"orderedmq-{orderedmq.__version__}"


#: A time of the commit, as `make dist` passes it.
EPOCH = {"SOURCE_DATE_EPOCH": "1767225600"}


def build(out: Path, *options: str, sources: Path = ROOT) -> str:
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(out), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | EPOCH)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a release, whose wheel was built from its sdist, and the output of the build."""
    out = tmp_path_factory.mktemp("release")
    return out, build(out)


@pytest.fixture(scope="module")
def wheel(release: tuple[Path, str]) -> Path:
    return release[0] / f"{NAME}-py3-none-any.whl"


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_release_is_one_sdist_and_one_wheel_and_is_built_without_a_warning(release: tuple[Path, str]) -> None:
    out, said = release
    assert sorted(path.name for path in out.iterdir()) == [f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz"]
    assert "warning" not in said.lower(), said


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_sources(wheel: Path, tmp_path: Path) -> None:
    build(tmp_path, "--wheel")
    assert contents(wheel) == contents(tmp_path / wheel.name)


def test_another_clone_gives_the_same_files_bit_by_bit(release: tuple[Path, str], tmp_path: Path) -> None:
    """In another folder, with other times and modes of the files, and written in another order."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("without a git repository, the list of its files is not known")
    clone = tmp_path / "another clone"
    for number, name in enumerate(reversed(listed.stdout.splitlines())):
        if (ROOT / name).exists():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)
            (clone / name).chmod(0o600)
            os.utime(clone / name, (number, 1_000_000_000 + number))
    build(tmp_path / "dist", sources=clone)
    assert [
        path.name for path in (tmp_path / "dist").iterdir() if path.read_bytes() != (release[0] / path.name).read_bytes()
    ] == []
    assert len(list((tmp_path / "dist").iterdir())) == 2


def test_the_wheel_has_a_bill_of_the_packages_on_which_it_depends(wheel: Path) -> None:
    bill = contents(wheel)[f"{NAME}.dist-info/sboms/sbom.cdx.json"]
    assert bill == (ROOT / "sbom.cdx.json").read_bytes()
    parsed = json.loads(bill)
    root = parsed["metadata"]["component"]
    assert (parsed["bomFormat"], root["name"], root["version"]) == ("CycloneDX", "orderedmq", orderedmq.__version__)
    [graph] = (entry["dependsOn"] for entry in parsed["dependencies"] if entry["ref"] == root["bom-ref"])
    needed = [Requirement(line) for line in metadata_of(wheel).get_all("Requires-Dist", [])]
    assert {name.partition("==")[0] for name in graph} == {requirement.name for requirement in needed if not requirement.marker}
    pinned = set((ROOT / "constraints.txt").read_text().splitlines())
    assert {f"{part['name']}=={part['version']}" for part in parsed["components"]} - pinned == set(), "run make sbom"


def metadata_of(wheel: Path) -> Message:
    return email.message_from_bytes(contents(wheel)[f"{NAME}.dist-info/METADATA"])


def test_the_wheel_has_what_users_need_and_nothing_else(wheel: Path) -> None:
    names = list(contents(wheel))
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"orderedmq", "ordered_source", "ordered_sink", "pyspark_orderedmq.py", "pytest_orderedmq.py"}
    for package in ("orderedmq", "ordered_source", "ordered_sink"):
        assert f"{package}/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    # The templates of the web page, and the files that they load.
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "orderedmq" / "ui").rglob("*.*") if path.suffix != ".pyc"}
    assert {Path(name).suffix for name in page} == {".py", ".html", ".css", ".js", ".svg"}
    assert page - set(names) == set()


def test_the_wheel_says_where_its_command_and_its_plugin_are(wheel: Path) -> None:
    entries = configparser.ConfigParser()
    entries.read_string(contents(wheel)[f"{NAME}.dist-info/entry_points.txt"].decode())
    assert {group: dict(entries[group]) for group in entries.sections()} == {
        "console_scripts": {"orderedmq": "orderedmq.cli:app"},
        "pytest11": {"orderedmq": "pytest_orderedmq"},
    }


def test_the_sdist_has_every_file_of_the_repository_but_those_of_its_host(release: tuple[Path, str]) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("without a git repository, the list of its files is not known")
    with tarfile.open(release[0] / f"{NAME}.tar.gz") as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    tracked = {name for name in listed.stdout.splitlines() if not name.startswith(".") and (ROOT / name).exists()}
    assert tracked - names == set()
    assert "Makefile" in tracked


def test_the_metadata_is_valid_and_says_what_an_index_shows(wheel: Path) -> None:
    text = contents(wheel)[f"{NAME}.dist-info/METADATA"]
    metadata = Metadata.from_email(text, validate=True)
    assert (metadata.name, str(metadata.version), metadata.license_expression) == (
        "orderedmq",
        orderedmq.__version__,
        "Apache-2.0",
    )
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    minors = [
        name.rpartition(".")[2]
        for name in metadata.classifiers or ()
        if name.startswith("Programming Language :: Python :: 3.")
    ]
    assert minors == sorted(minors)
    assert isinstance(metadata.requires_python, SpecifierSet)
    oldest = next(minor for minor in range(20) if f"3.{minor}" in metadata.requires_python)
    assert minors[0] == str(oldest), "the oldest Python in the classifiers must be the oldest that requires_python allows"
