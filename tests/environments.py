"""Environments of other releases of Spark: PySpark with packages of its time, as platforms ship them, with or without this project.

``spark_environment("4.1")`` returns the Python of such an environment, into which pip has installed the wheel of the current sources.
Creating an environment takes a minute and 1 GB. It is kept in the folder ``environments`` of the tests' own environment, so a later
call takes seconds. ``run`` starts a program there.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from orderedmq.java import ensure_java

ROOT: Final = Path(__file__).resolve().parents[1]
#: The folder of kept environments.
FOLDER: Final = Path(sys.prefix) / "environments"

#: The newest patch of each minor release, and packages as its users have them. Those of 4.0 and 4.1 are the ones of Databricks
#: Runtime 17.3 LTS and 18, where they are known, because its packages are older than other platforms'. In addition to what PySpark
#: needs, they are the packages that this project's dependencies share with a platform.
RELEASES: Final[Mapping[str, tuple[str, ...]]] = {
    "4.0": (
        *("pyspark==4.0.5", "pandas==2.2.3", "numpy==2.1.3", "pyarrow==19.0.1"),
        *("grpcio==1.67.0", "grpcio-status==1.67.0", "googleapis-common-protos==1.65.0", "protobuf==5.29.4"),
        *("click==8.1.7", "rich==13.9.4", "markdown-it-py==2.2.0", "mdurl==0.1.0", "Pygments==2.15.1"),
        *("pydantic==2.10.6", "typing_extensions==4.12.2", "annotated-types==0.7.0", "psutil==5.9.0"),
        *("python-dateutil==2.9.0.post0", "pytz==2024.1", "six==1.16.0"),
    ),
    "4.1": (
        *("pyspark==4.1.4", "pandas==2.2.3", "numpy==2.1.3", "pyarrow==21.0.0"),
        *(
            "grpcio==1.76.0",
            "grpcio-status==1.76.0",
            "googleapis-common-protos==1.71.0",
            "protobuf==6.33.0",
            "zstandard==0.25.0",
        ),
        *("click==8.1.8", "rich==13.9.4", "markdown-it-py==2.2.0", "mdurl==0.1.0", "Pygments==2.19.1"),
        *("pydantic==2.10.6", "typing_extensions==4.12.2", "annotated-types==0.7.0", "psutil==5.9.0"),
        *("python-dateutil==2.9.0.post0", "pytz==2024.1", "six==1.17.0"),
    ),
    "4.2": (
        *("pyspark==4.2.1", "pandas==2.3.3", "numpy==2.3.5", "pyarrow==22.0.0"),
        *(
            "grpcio==1.76.0",
            "grpcio-status==1.76.0",
            "googleapis-common-protos==1.71.0",
            "protobuf==6.33.0",
            "zstandard==0.25.0",
        ),
        *("click==8.3.0", "rich==14.2.0", "typing_extensions==4.15.0", "psutil==7.1.0"),
    ),
    "4.3": (
        *("pyspark==4.3.0", "pandas==2.3.3", "numpy==2.4.6", "pyarrow==26.0.1"),
        *("grpcio==1.85.1", "grpcio-status==1.85.1", "googleapis-common-protos", "protobuf", "zstandard", "psutil"),
    ),
}


def interpreter(version: str) -> Path | None:
    """Return an interpreter of a minor version of Python ("3.12") on this machine, on PATH or of pyenv; None if there is none."""
    on_path = shutil.which(f"python{version}")
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for python in [*([Path(on_path)] if on_path else []), *of_pyenv]:
        # A shim of pyenv is on PATH also for versions that are not active, and then fails.
        if subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
            return python
    return None


def platform(release: str, base: Path = Path(sys.executable)) -> Path:
    """Return the Python of an environment like a platform's: PySpark of the minor ``release``, without this project.

    Tests share it, so they must not change it: they change a ``copy_of`` it. ``base``: the interpreter of the environment.
    """
    return environment(_folder(release, base), RELEASES[release], base)


def environment(folder: Path, packages: Sequence[str], base: Path = Path(sys.executable)) -> Path:
    """Return the Python of a kept environment with these packages. The first one is PySpark."""
    with _locked(folder):
        if _kept(folder).get("packages") != list(packages):
            shutil.rmtree(folder, ignore_errors=True)
            command([str(base), "-m", "venv", str(folder)])
            with tempfile.TemporaryDirectory(dir=FOLDER) as wheels:
                # PySpark is distributed as source. A wheel without compression is built and unpacked much faster.
                uncompressed = Path(wheels, "uncompressed.cfg")
                uncompressed.write_text("[bdist_wheel]\ncompression = stored\n")
                options = ("-q", "--no-deps", "--no-build-isolation", "-w", wheels)
                build = [sys.executable, "-m", "pip", "wheel", *options, packages[0]]
                command(build, variables={"DIST_EXTRA_CONFIG": str(uncompressed)})
                pip(folder / "bin" / "python", "install", "-q", "--no-compile", "--find-links", wheels, *packages)
            _keep(folder, {"packages": list(packages)})
    return folder / "bin" / "python"


def copy_of(python: Path, folder: Path) -> Path:
    """Copy the environment of ``python`` to ``folder`` and return the Python of the copy. Hard links make that quick, where possible."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(python.parents[1], folder, symlinks=True, copy_function=link)
    return folder / "bin" / "python"


def _folder(release: str, base: Path) -> Path:
    return FOLDER / (f"spark-{release}" if base == Path(sys.executable) else f"spark-{release}-{base.resolve().name}")


def spark_environment(release: str, base: Path = Path(sys.executable)) -> Path:
    """Return the Python of an environment of the minor ``release`` of Spark ("4.1") with the wheel of the current sources.

    The wheel is installed as a user does it, with its dependencies and without an extra. Within a run of the tests the environment does not
    change, and several processes may use it. ``base``: the interpreter of the environment.
    """
    python_of_platform = platform(release, base)
    folder = _folder(release, base).with_name(f"{_folder(release, base).name}-orderedmq")
    python = folder / "bin" / "python"
    state = {"packages": list(RELEASES[release]), "wheel": hashlib.sha256(wheel().read_bytes()).hexdigest()}
    with _locked(folder):
        kept = _kept(folder)
        if kept.get("packages") != state["packages"]:
            shutil.rmtree(folder, ignore_errors=True)
            copy_of(python_of_platform, folder)
        if kept != state:
            # pip would keep the installed package of the same version.
            pip(python, "uninstall", "-q", "-y", "orderedmq")
            pip(python, "install", "-q", "--no-compile", str(wheel()))
            _keep(folder, state)
    return python


@functools.cache
def wheel() -> Path:
    """Return the wheel of the current sources, built once in each process."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as out:
        command([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, str(ROOT)])
        [built] = Path(out).iterdir()
        folder = FOLDER / "wheels" / hashlib.sha256(built.read_bytes()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        return built.replace(folder / built.name)


def run(python: Path, *arguments: str, cwd: Path, timeout: float = 600.0, variables: Mapping[str, str] | None = None) -> str:
    """Run ``python`` with arguments in the folder ``cwd`` and return its standard output. AssertionError if it fails.

    Of the variables of the tests' own Python and Spark, the program sees none. It finds a Java.
    """
    return command([str(python), *arguments], cwd=cwd, timeout=timeout, variables=variables)


def pip(python: Path, *arguments: str) -> str:
    """Run pip in the environment of ``python`` and return its standard output."""
    return command(
        [str(python), "-m", "pip", *arguments],
        variables={"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_WARN_SCRIPT_LOCATION": "1"},
    )


def packages_of(python: Path) -> dict[str, str]:
    """Return the packages of an environment and their versions."""
    return {package["name"]: package["version"] for package in json.loads(pip(python, "list", "--format", "json"))}


def command(
    arguments: list[str], cwd: Path | None = None, timeout: float = 1200.0, variables: Mapping[str, str] | None = None
) -> str:
    """Run a program without the tests' own variables and return its standard output. AssertionError if it fails."""
    ensure_java()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARK", "PYSPARK"))}
    completed = subprocess.run(
        arguments, capture_output=True, text=True, timeout=timeout, cwd=cwd, env={**inherited, **(variables or {})}
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other processes from creating the environment ``folder``."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _kept(folder: Path) -> dict[str, object]:
    """Return the state that ``_keep`` has recorded, or {} if the environment is not complete."""
    try:
        state: dict[str, object] = json.loads((folder / "environment.json").read_text())
    except FileNotFoundError:
        return {}
    return state


def _keep(folder: Path, state: Mapping[str, object]) -> None:
    """Record the state of an environment, after everything else."""
    folder.joinpath("environment.json").unlink(missing_ok=True)
    folder.joinpath("environment.json").write_text(json.dumps(state))
