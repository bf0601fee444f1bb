"""A store, and the command on it, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orderedmq.cli import app
from tests.command import Run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def run(store: Path) -> Run:
    """Run the command and check its exit code. Return the JSON lines that it printed, or standard error if it printed none and failed."""

    def call(*arguments: str, code: int = 0, input: str | bytes | None = None) -> Any:
        result = CliRunner().invoke(app, ["--path", str(store), *arguments], input=input)
        assert result.exit_code == code, result.output
        if code == 0 or result.stdout:
            return [json.loads(line) for line in result.stdout.splitlines()]
        assert "Traceback" not in result.output
        assert isinstance(result.exception, SystemExit)
        if result.stderr.startswith("orderedmq: ["):
            assert len(result.stderr.splitlines()) == 1
        return result.stderr

    return call


@pytest.fixture
def text(store: Path) -> Run:
    """Run the command for a person. Return standard output and standard error."""

    def call(*arguments: str, code: int = 0, input: str | None = None) -> str:
        result = CliRunner().invoke(app, ["--path", str(store), "--no-json", *arguments], input=input, env={"COLUMNS": "240"})
        assert result.exit_code == code, result.output
        return result.output

    return call
