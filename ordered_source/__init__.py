"""The source: Spark's readers over a broker. ``reader`` runs on the driver, ``task`` on executors; the rules are in orderedmq."""
