"""The functions behind the command and the web pages, without their display."""
