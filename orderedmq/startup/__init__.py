"""Makes Spark start sooner, with compiled PySpark for its Python processes and an archive of the classes that its JVM loads.

Only ``training`` imports Spark. It is a separate program, which is started to make the archive.
"""
