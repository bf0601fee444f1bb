"""``orderedmq exporter`` as a program: it starts without a broker, survives the loss of the broker, and ends with Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import orderedmq
from tests.command import COMMAND, ENVIRONMENT
from tests.promtool import promtool
from tests.ui_site import rows
from tests.waits import until


def test_the_exporter_starts_before_the_store_and_outlives_it(path: Path) -> None:
    token = "a-secret-of-this-test"
    command = [*COMMAND, "exporter", "--port", "0", "--path", str(path), "--json"]
    environment = {**ENVIRONMENT, "ORDEREDMQ_METRICS_TOKEN": token}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            url = json.loads(process.stdout.readline())["url"]

            def scraped() -> str:
                request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return str(answer.read().decode())

            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(url, timeout=30)
            assert "\norderedmq_up 0.0\n" in scraped()
            with orderedmq.connect(path) as broker:
                broker.admin.create_topic("orders", 2)
                queues = broker.log.queues("orders")
                broker.log.append({queues[1]: rows([b"a", b"b"], "x", "y")})
                broker.groups.lock("billing", broker.groups.join("query"), queues)
                lag = 'orderedmq_group_lag_messages{broker="embedded",group="billing",queue="1",topic="orders"} 2.0'
                said = until(lambda: (text := scraped()) and lag in text and text)
                # promtool also checks the style of names, units and help texts.
                checked = promtool("check", "metrics", given=said)
                assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
                path.rename(path.with_name("away"))
                until(lambda: "\norderedmq_up 0.0\n" in scraped())
                path.with_name("away").rename(path)
                until(lambda: lag in scraped())
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            log_lines = process.stderr.read().splitlines()
        finally:
            process.kill()
    assert [line.partition(",")[0] for line in log_lines] == [
        "the broker cannot be reached",
        "the broker can be reached again",
    ] * 2
