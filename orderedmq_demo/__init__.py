"""The Spark job of ``orderedmq demo``. A package of its own: ``orderedmq`` imports neither Spark nor what does."""
