"""Makes the messages of a topic a streaming table, and copies those of paid orders to another topic."""

from pathlib import Path

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

# The path must be absolute. Over RocketMQ: {"namesrvAddr": "host:9876"}.
BROKER = {"path": str(Path(__file__).resolve().parents[1] / "data" / "omq")}


def messages(group: str) -> DataFrame:
    """Return the topic's messages as a stream. Each flow is a separate query, so each needs its own consumer group."""
    options = {**BROKER, "topic": "orders", "consumerGroup": group, "startingOffsets": "earliest"}
    return SparkSession.active().readStream.format("orderedmq").options(**options).load()


@dp.table
def events() -> DataFrame:
    total = "get_json_object(string(body), '$.total') AS total"
    return messages("warehouse").selectExpr("queue_id", "queue_offset", "sharding_key AS order_id", "tags AS event", total)


dp.create_sink("paid_orders", "orderedmq", {**BROKER, "topic": "paid", "topicQueueNums": "2"})


@dp.append_flow(target="paid_orders")
def paid() -> DataFrame:
    return messages("shipping").where("tags = 'paid'").select("sharding_key", "tags", "body")
