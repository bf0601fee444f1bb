"""The files in deploy: the image, the trial with Docker Compose, and the systemd unit. No test builds or starts a container.

What their programs need is checked instead: each file that they name exists, images have versions, promtool and systemd-analyze accept
the configurations, and the query runs.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import orderedmq
from tests.command import ENVIRONMENT
from tests.promtool import promtool
from tests.ui_site import rows
from tests.waits import until

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
EXAMPLE = ROOT / "examples" / "billing"
MONITORING = ROOT / "docs" / "monitoring"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def test_services_name_files_that_exist_and_images_with_a_version(services: dict[str, Any]) -> None:
    mounts = [mount.split(":") for service in services.values() for mount in service.get("volumes", [])]
    assert len(mounts) == 6
    for source, _, mode in mounts:
        assert (DEPLOY / source).is_file(), source
        assert mode == "ro"
    for name, service in services.items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        assert set(service.get("depends_on", {})) <= set(services)
        for needed, how in service.get("depends_on", {}).items():
            assert how["condition"] != "service_healthy" or "healthcheck" in services[needed], (name, needed)
        # Nothing can be reached from another machine.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_the_image_installs_extras_of_the_package_as_another_user_than_root() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r"pip install \S+ --constraint constraints.txt '\.\[([\w,]+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert f"orderedmq:{project['version']} ." in DOCKERFILE
    lines = DOCKERFILE.splitlines()
    assert lines.index("USER orderedmq") < lines.index('ENTRYPOINT ["orderedmq"]')
    assert re.search(r"^FROM python:3\.\d+\.\d+-slim-bookworm$", DOCKERFILE, re.MULTILINE)


def test_the_context_of_the_image_has_all_that_the_package_is_built_from() -> None:
    sent = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert [name for name in sorted(sent) if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["only-include"], *wheel["sbom-files"], *project["project"]["license-files"], project["project"]["readme"]}
    assert needed | {"pyproject.toml", "constraints.txt"} == sent


def test_prometheus_and_grafana_accept_their_configurations(services: dict[str, Any], tmp_path: Path) -> None:
    for mount in services["prometheus"]["volumes"]:
        source, inside, _ = mount.split(":")
        shutil.copy(DEPLOY / source, tmp_path / Path(inside).name)
    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    [provider] = yaml.safe_load((DEPLOY / "grafana-dashboards.yaml").read_text())["providers"]
    assert f"docs/monitoring/dashboard.json:{provider['options']['path']}/" in " ".join(services["grafana"]["volumes"])
    [source] = yaml.safe_load((DEPLOY / "grafana-datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing on this machine")
    unit = tmp_path / "orderedmq-exporter.service"
    text = (DEPLOY / unit.name).read_text()
    # The check wants the program to exist.
    unit.write_text(text.replace("/opt/orderedmq/bin/orderedmq", f"{Path(sys.executable).parent}/orderedmq"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", unit], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, unit.name in done.stderr) == (0, False), done.stderr


@pytest.mark.nightly
@pytest.mark.spark
def test_the_query_of_the_trial_parks_one_bad_order_and_ends_with_sigterm(tmp_path: Path) -> None:
    store = tmp_path / "omq"
    with orderedmq.connect(store) as broker:
        broker.admin.create_topic("orders", 4)
        lines = [line.split(":") for line in (EXAMPLE / "orders.txt").read_text().splitlines()]
        orderedmq.Producer(broker.log, "orders").send(rows([body.encode() for _, body in lines], *(key for key, _ in lines)))
        environment = {**ENVIRONMENT, "ORDEREDMQ_PATH": str(store)}
        command = [sys.executable, str(EXAMPLE / "billing.py")]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as query:
            try:
                until(lambda: parked(store) == ["order-2"], timeout=300)
                query.send_signal(signal.SIGTERM)
                assert query.wait(90) == 143
            finally:
                query.kill()


def parked(store: Path) -> list[str]:
    command = [sys.executable, "-m", "orderedmq", "--path", str(store), "parked", "list", "billing", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    return [json.loads(line)["sharding_key"] for line in done.stdout.splitlines()] if done.returncode == 0 else []
