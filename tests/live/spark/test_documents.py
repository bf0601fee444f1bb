"""The Python snippets of the README and of the site run. Those of a page run in order, in a separate folder."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from orderedmq.cli import app
from tests.schema_registry import schema_registry
from tests.snippets import ROOT, Snippet, execute, name, pages, quick_start, run, snippets

PAGES = pages()
_FIELDS: Final = [
    {"name": "id", "type": "long"},
    {"name": "status", "type": "string"},
    {"name": "note", "type": ["null", "string"]},
]
#: The schemas in the registry of the guide about bodies.
ORDER: Final = {"type": "record", "name": "Order", "fields": _FIELDS}
ORDER_2: Final = {**ORDER, "fields": [*_FIELDS, {"name": "currency", "type": "string", "default": "EUR"}]}
#: Pages whose snippets take 7 s or longer. Only the long tier runs them.
LONG = (
    "formats",
    "other-sinks",
    "stateful-processing",
    "order-per-key",
    "conversations",
    "sink",
    "deploying",
    "rollouts",
)


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=name(path), marks=[pytest.mark.nightly] if path.stem in LONG else []) for path in PAGES]
)
@pytest.mark.timeout(400)
def test_the_snippets_of_a_page_run_one_after_another(
    path: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with schema_registry({7: ORDER, 8: ORDER_2}) as address:
        run(PAGES[path], spark, tmp_path, {"http://registry:8081": address})


@pytest.mark.nightly
def test_a_schema_registry_that_is_away_makes_no_dead_letter() -> None:
    """A body whose schema cannot be fetched now is not a bad body, so its error must pass `decoding`."""
    guide: dict[str, Any] = {"__name__": "__main__"}
    formats = ROOT / "docs" / "guides" / "formats.md"
    with schema_registry({}) as address:
        for snippet in snippets(formats):
            if any(name in snippet.code for name in ("ORDER = parse_schema", "class RegistryAway")):
                execute(snippet._replace(code=snippet.code.replace("http://registry:8081", address)), guide)
        with pytest.raises(guide["RegistryAway"]):
            guide["decode_framed"](b"\0" + (500).to_bytes(4, "big"))
        with pytest.raises(ValueError, match="schema 9 is not known"):
            guide["decode_framed"](b"\0" + (9).to_bytes(4, "big"))
    assert not issubclass(guide["RegistryAway"], Exception)


def test_the_quick_start_runs(spark: SparkSession, tmp_path: Path) -> None:
    programs, (_, *commands) = quick_start()
    readme = (ROOT / "README.md").read_text()
    assert f"```python\n{programs['billing.py']}```" in readme, "README and docs/index.md must have the same program"
    in_readme = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    assert "".join(in_readme).splitlines()[1:] == commands[:4], "README and docs/index.md must have the same commands"
    # The console of the session's JVM is not this process's.
    outcomes = {'format("console")': f'format("json").option("path", "{tmp_path}/outcomes")'}
    outputs = []
    for command in commands:
        if command.startswith("python "):
            program = programs[command.removeprefix("python ")]
            run([Snippet(ROOT / "docs" / "index.md", 1, program, "")], spark, tmp_path, outcomes)
            continue
        if command.startswith("sed "):
            _, before, after, _ = shlex.split(command)[2].split("/")
            assert before in programs["billing.py"]
            programs["billing.py"] = programs["billing.py"].replace(before, after)
            continue
        before, _, after = command.rpartition("orderedmq ")
        typed = before.removeprefix("printf '").removesuffix("' | ").replace("\\n", "\n")
        done = CliRunner().invoke(app, shlex.split(after.replace("data/", f"{tmp_path}/data/")), input=typed)
        assert done.exit_code == 0, f"{command}\n{done.output}"
        outputs.append(done.stdout)
    _, _, parked, _, group, invoices = outputs
    assert json.loads(parked)["error"] in readme
    billed = spark.read.json(f"{tmp_path}/outcomes").groupBy("sharding_key", "status").count().collect()
    parked_and_billed = {("order-2", "PARKED", 2), ("order-2", "SUCCESS", 2)}
    assert set(map(tuple, billed)) == {("order-1", "SUCCESS", 2), ("order-3", "SUCCESS", 1), *parked_and_billed}
    assert [row["lag"] for row in map(json.loads, group.splitlines()) if row["kind"] == "queue"] == [0]
    assert re.findall(r"order-1 costs ([\d.,]+)", invoices) == ["20.50", "3.00"]
    assert re.findall(r"order-2 costs ([\d.,]+)", invoices) == ["7,00", "9.00"]
