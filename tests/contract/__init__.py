"""What every broker must do.

With this file, fixtures of scope ``package`` end with the last test of the folder, and so their servers stop then. Without it
they would live until the end of the session.
"""
