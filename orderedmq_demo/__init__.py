"""The Spark job of ``orderedmq demo``.

A package of its own, because ``orderedmq`` never imports Spark, directly or indirectly.
"""
