"""Runs queries over RocketMQ with secrets as options, in a Spark that logs everything, and prints what Spark shows of them.

    python -m tests.live.rocketmq.secrets_job classic ADDRESS FOLDER
    python -m tests.live.rocketmq.secrets_job connect ADDRESS FOLDER PATTERN

PATTERN is the server's spark.redaction.string.regex. The event log is written to FOLDER/events, the checkpoint to FOLDER/checkpoint.
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from orderedmq.rocketmq.local.probe import find_free_port
from tests.quick_spark import QUICK_JVM

#: An account. The servers accept it because they have no access control.
ACCOUNT: Final = {"accessKey": "hidden-access", "secretKey": "hidden-secret", "securityToken": "hidden-token"}
#: Options of a query that is not run, because the servers have no TLS.
TLS: Final = {"useTLS": "true", "tlsCertPath": "/c", "tlsKeyPath": "/k", "tlsKeyPassword": "hidden-password"}
SECRETS: Final = (*ACCOUNT.values(), TLS["tlsKeyPassword"])


def show(spark: SparkSession, address: str, folder: Path) -> None:
    broker = {"namesrvAddr": address, **ACCOUNT}
    batch = spark.read.format("orderedmq").options(**broker, topic="secrets").load()
    batch.explain(True)
    batch.write.format("orderedmq").mode("append").options(**broker, topic="secrets", shardingKey="none").save()
    stream = spark.readStream.format("orderedmq").options(**broker, topic="secrets", consumerGroup="secrets").load()
    stream.explain(True)
    copy = stream.select("body").writeStream.format("orderedmq").options(**broker, topic="secrets", shardingKey="none")
    query = copy.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    query.explain(True)
    print(query.lastProgress, query.status)
    given = ", ".join(f"{name} = '{value}'" for name, value in broker.items())
    spark.sql(f"CREATE TABLE secrets USING orderedmq OPTIONS ({given}, topic 'secrets')")
    for statement in ("DESCRIBE EXTENDED secrets", "SHOW CREATE TABLE secrets"):
        spark.sql(statement).show(100, truncate=False)
    spark.sql(f"SELECT count(*) FROM secrets WITH ({given}, topic = 'secrets')").show()
    reader = (
        spark.readStream.format("orderedmq").schema("body binary").options(**broker | TLS, topic="secrets", consumerGroup="tls")
    )
    reader.load().explain(True)
    try:
        spark.read.format("orderedmq").options(**broker | {"namesrvAddr": "127.0.0.1:1"}, topic="secrets").load()
    except PySparkException as error:
        print(error)


def main(kind: str, address: str, folder: str, pattern: str = "") -> None:
    builder = SparkSession.builder.remote("local[2]") if kind == "connect" else SparkSession.builder.master("local[2]")
    port = find_free_port()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{folder}/events",
        "spark.eventLog.compress": "false",
        "spark.ui.port": str(port),
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.driver.extraJavaOptions": " ".join(QUICK_JVM),
        **({"spark.redaction.string.regex": pattern} if pattern else {}),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    if kind == "classic":
        spark.sparkContext.setLogLevel("INFO")
    show(spark, address, Path(folder))
    for page in (
        "SQL/",
        "SQL/execution/?id=1",
        "StreamingQuery/",
        "jobs/",
        "stages/",
        *(["connect/"] if kind == "connect" else []),
    ):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=30) as answer:
            print(answer.read().decode())
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
