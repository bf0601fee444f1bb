"""The alert rules and the dashboard: promtool accepts the rules, alerts fire exactly when they should, and all metrics in rules
and dashboard exist.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from orderedmq.ui.metrics import METRICS
from tests.promtool import promtool

FOLDER = Path(__file__).parents[3] / "docs" / "monitoring"
RULES = FOLDER / "alerts.yml"
DASHBOARD = FOLDER / "dashboard.json"

_GROUP = 'instance="e:9405",job="orderedmq",group="billing"'
_TOPIC = f'{_GROUP},topic="orders"'


def queue(number: int = 0, more: str = "") -> str:
    return f'{{{_TOPIC},broker="embedded",queue="{number}"{more}}}'


UP = 'orderedmq_up{instance="e:9405",job="orderedmq"}'
FAILURES = 'orderedmq_exporter_failures_total{instance="e:9405",job="orderedmq",condition="ORDEREDMQ_ROCKETMQ.NO_PERMISSION"}'
LAG = f"orderedmq_group_lag_seconds{queue()}"
COMMIT = f"orderedmq_group_last_commit_age_seconds{queue()}"
LOCK = "orderedmq_group_lock_remaining_seconds" + queue(more=',owner="billing"')
HORIZON = f"orderedmq_group_retention_horizon_seconds{queue()}"
DELETED = f"orderedmq_group_deleted_messages{queue()}"
OLDEST = f"orderedmq_group_parked_oldest_age_seconds{{{_TOPIC}}}"
KEYS = f"orderedmq_group_parked_keys{{{_TOPIC}}}"
HELD = f"orderedmq_group_held_keys{{{_TOPIC}}}"
LETTERS = f"orderedmq_group_dead_letters_total{{{_GROUP}}}"
HANDOVERS = f"orderedmq_group_handovers_total{{{_GROUP}}}"
MESSAGES = [f"orderedmq_group_lag_messages{queue(number)}" for number in range(4)]
FOUR_QUEUES = dict.fromkeys(MESSAGES, "0x60")
WELL = {UP: "1x60"}


class Case(NamedTuple):
    """``series``: a value for each minute, in promtool's notation. ``fires``: whether the alert fires after ``minutes``."""

    alert: str
    what: str
    series: dict[str, str]
    minutes: int
    fires: bool


CASES = [
    Case("ExporterMissing", "nothing is scraped", {}, 6, True),
    Case("ExporterMissing", "one of two is not scraped", {**WELL, 'up{instance="f:9405",job="orderedmq"}': "0x20"}, 8, True),
    Case("ExporterMissing", "both are scraped", {**WELL, 'up{instance="f:9405",job="orderedmq"}': "1x20"}, 8, False),
    Case("ExporterMissing", "the broker is away, but the exporter answers", {UP: "0x60"}, 10, False),
    Case("BrokerUnreachable", "the broker went away", {UP: "1x3 0x10"}, 8, True),
    Case("BrokerUnreachable", "the broker came back within two minutes", {UP: "1x3 0 1x10"}, 8, False),
    Case("GroupNotSeen", "every read of a group is refused", {**WELL, FAILURES: "0+4x40"}, 20, True),
    Case(
        "GroupNotSeen", "the whole broker is away, for which another alert fires", {UP: "0x60", FAILURES: "0+4x40"}, 20, False
    ),
    Case(
        "QueuesGone",
        "the nameserver no longer lists one of two brokers",
        {**WELL, MESSAGES[0]: "5x60", MESSAGES[1]: "5x20 _x40"},
        40,
        True,
    ),
    Case("QueuesGone", "none of a topic's brokers is listed", {**WELL, MESSAGES[0]: "5x20 _x40"}, 40, True),
    Case("QueuesGone", "a broker restarts", {**WELL, MESSAGES[0]: "5x60", MESSAGES[1]: "5x20 _ _ 5x40"}, 24, False),
    Case("QueuesGone", "queues are added", {**WELL, MESSAGES[0]: "5x60", MESSAGES[1]: "_x20 5x40"}, 40, False),
    Case(
        "QueuesGone",
        "the whole broker is away, for which another alert fires",
        {UP: "1x20 0x40", MESSAGES[0]: "5x20 _x40"},
        40,
        False,
    ),
    Case(
        "GroupStuck",
        "a query that had processed everything hangs, and still renews its locks",
        {**WELL, LAG: "0x5 0+60x20", COMMIT: "0+60x30", LOCK: "55x30"},
        14,
        True,
    ),
    Case("GroupStuck", "a query is behind and commits", {**WELL, LAG: "0+60x30", COMMIT: "20x30", LOCK: "55x30"}, 25, False),
    Case("GroupStuck", "no messages are waiting", {**WELL, LAG: "0x30", COMMIT: "0+60x30", LOCK: "55x30"}, 25, False),
    Case(
        "GroupStuck",
        "no query owns the queue, for which another alert fires",
        {**WELL, LAG: "0+60x30", COMMIT: "0+60x30"},
        25,
        False,
    ),
    Case("QueueWithoutOwner", "messages wait, and no query runs", {**WELL, LAG: "0+60x20"}, 8, True),
    Case("QueueWithoutOwner", "the owner is dead", {**WELL, LAG: "0+60x20", LOCK: "0x20"}, 8, True),
    Case("QueueWithoutOwner", "the owner is alive", {**WELL, LAG: "0+60x20", LOCK: "55x20"}, 15, False),
    Case("GroupBehind", "the group stays behind", {**WELL, LAG: "1000x30"}, 12, True),
    Case("GroupBehind", "the group is behind for seven minutes", {**WELL, LAG: "1000x30"}, 7, False),
    Case(
        "RetentionNear",
        "more than half of the retention time is over",
        {**WELL, LAG: "44000+60x20", HORIZON: "42400-60x20"},
        7,
        True,
    ),
    Case("RetentionNear", "nearly all of seven days is left", {**WELL, LAG: "1000+60x20", HORIZON: "603800-60x20"}, 15, False),
    Case("RetentionNear", "the topic has no retention", {**WELL, LAG: "9000000x20"}, 15, False),
    Case("MessagesDeleted", "the group lost messages", {**WELL, DELETED: "0x5 7x5"}, 7, True),
    Case("MessagesDeleted", "nothing was deleted", {**WELL, DELETED: "0x10"}, 7, False),
    Case("KeysParked", "a key waits for over an hour", {**WELL, OLDEST: "3000+60x30", KEYS: "2x30", HELD: "1x30"}, 20, True),
    Case("KeysParked", "a key waits for some minutes", {**WELL, OLDEST: "100+60x30", KEYS: "1x30", HELD: "0x30"}, 20, False),
    Case("KeysParked", "an operator holds all keys", {**WELL, OLDEST: "9000+60x30", KEYS: "2x30", HELD: "2x30"}, 20, False),
    Case("DeadLetters", "a dead letter is written", {**WELL, LETTERS: "0x5 1x10"}, 8, True),
    Case("DeadLetters", "all dead letters are old", {**WELL, LETTERS: "3x30"}, 20, False),
    Case("OwnersFlap", "a queue is handed over every minute", {**WELL, **FOUR_QUEUES, HANDOVERS: "0+1x60"}, 40, True),
    Case("OwnersFlap", "a query was restarted once", {**WELL, **FOUR_QUEUES, HANDOVERS: "0x20 4x40"}, 40, False),
]


def judged(rules: Path, cases: list[Case]) -> str:
    """Return the tests of these cases for promtool. They are JSON, which is also YAML."""
    tests = [
        {
            "interval": "1m",
            "name": f"{case.alert}: {case.what}",
            "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count by (alertname) (ALERTS{{alertname="OrderedMQ{case.alert}",alertstate="firing"}})',
                    "eval_time": f"{case.minutes}m",
                    "exp_samples": [{"labels": f'{{alertname="OrderedMQ{case.alert}"}}', "value": 1}] if case.fires else [],
                }
            ],
        }
        for case in cases
    ]
    return json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests})


def alerts() -> list[str]:
    return re.findall(r"^      - alert: (\w+)$", RULES.read_text(), re.MULTILINE)


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    file = tmp_path / "tests.yml"
    file.write_text(judged(RULES, CASES))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
    for fires in (True, False):
        assert {f"OrderedMQ{case.alert}" for case in CASES if case.fires is fires} == set(alerts())


@pytest.mark.parametrize("file", [RULES, DASHBOARD], ids=lambda file: file.name)
def test_rules_and_dashboard_name_metrics_that_are_exported(file: Path) -> None:
    named = set(re.findall(r"\borderedmq_\w+", file.read_text()))
    assert len(named) > 8
    assert named - {kind.name for kind in METRICS} == set()


def test_each_alert_links_to_its_section_of_the_guide() -> None:
    guide = (FOLDER.parent / "guides" / "monitoring.md").read_text()
    headings = re.findall(r"^### (OrderedMQ\w+)$", guide, re.MULTILINE)
    assert headings == alerts()
    anchors = re.findall(r"runbook_url: docs/guides/monitoring\.md#(\w+)$", RULES.read_text(), re.MULTILINE)
    assert anchors == [name.lower() for name in alerts()]
