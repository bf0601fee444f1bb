"""The functions that the command and the web pages call. They display nothing."""
