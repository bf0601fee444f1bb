"""The tests. It is a package so that pytest imports a module of tests/rocketmq by the name that Spark's workers find it by."""
