"""The program of test_from_kafka: copies a Kafka topic, is killed in the middle of a micro-batch, and processes the copy.

A process of its own, because a session gets the jars of Spark's Kafka connector when it starts.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.kafka_server import KafkaServer, fetch_connector
from orderedmq.errors import ServersError
from orderedmq.testing import TemporaryStore
from orderedmq.testing.session import local_session
from tests.snippets import ROOT, execute, snippets

MESSAGES = 2_000
#: The exit code if Kafka's jars cannot be fetched.
NO_JARS = 3


def main(folder: Path) -> None:
    guide: dict[str, Any] = {"__name__": "__main__"}
    for snippet in snippets(ROOT / "docs" / "guides" / "from-kafka.md"):
        execute(snippet, guide)
    try:
        _, jars = fetch_connector()
    except ServersError as error:
        print(error)
        sys.exit(NO_JARS)
    (folder / "kafka").mkdir()
    with (
        KafkaServer(folder / "kafka") as server,
        local_session({"spark.jars": ",".join(map(str, jars))}) as spark,
        TemporaryStore(folder / "test") as store,
    ):
        jvm: Any = spark._jvm
        clients = jvm.org.apache.kafka.clients.admin
        settings = jvm.java.util.Properties()
        settings.put("bootstrap.servers", server.address)
        topic = clients.NewTopic("orders", jvm.java.util.Optional.of(3), jvm.java.util.Optional.empty())
        with contextlib.closing(clients.AdminClient.create(settings)) as admin:
            admin.createTopics(jvm.java.util.Collections.singletonList(topic)).all().get()
        rows = spark.range(MESSAGES).selectExpr("concat('order-', id % 20) AS key", "cast(id AS string) AS value")
        rows.coalesce(1).write.format("kafka").option("kafka.bootstrap.servers", server.address).option(
            "topic", "orders"
        ).save()
        store.kill_in_batch(partial(guide["copy"], servers=server.address), spark, batch=1)
        store.assert_same([(f"order-{number % 20}", str(number)) for number in range(MESSAGES)], "orders")
        store.run_to_end(guide["billing"], spark)
        parked = [message["sharding_key"] for message in store.messages("%PARKED%billing%orders")]
        assert parked == ["order-7"] * (MESSAGES // 20), parked


if __name__ == "__main__":
    main(Path(sys.argv[1]))
