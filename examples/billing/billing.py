"""Bills the orders of a topic, in the order of each key, until SIGTERM. ORDEREDMQ_NAMESRV or ORDEREDMQ_PATH names the broker."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from pyspark.sql import SparkSession

import orderedmq
from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, OrderPerKey, consume_orderly, stop_on_sigterm

BROKER = {"namesrvAddr": "ORDEREDMQ_NAMESRV"} if "ORDEREDMQ_NAMESRV" in os.environ else {"path": "ORDEREDMQ_PATH"}


def bill(messages: Sequence[Any], _: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
    for message in messages:
        # An amount that is not a number parks its order. Other orders continue.
        sys.stdout.write(f"{message.sharding_key}: {float(message.body):.2f}\n")
    return ConsumeOrderlyStatus.SUCCESS


spark = orderedmq.tuned(SparkSession.builder.master("local[*]").appName("billing")).getOrCreate()
stop_on_sigterm(spark)
orders = (
    spark.readStream.format("orderedmq")
    .options(**{option: os.environ[variable] for option, variable in BROKER.items()})
    .options(topic="orders", consumerGroup="billing", parkingLot=True)
    .load()
)
outcomes = consume_orderly(orders, bill, OrderPerKey(in_batch_attempts=1))
outcomes.writeStream.format("noop").option("checkpointLocation", "billing-checkpoint").start().awaitTermination()
