"""What lets Spark start sooner: compiled PySpark for its Python processes, and an archive of the classes that its JVM loads.

Nothing here imports Spark but ``training``, a program of its own that is started to make the archive.
"""
