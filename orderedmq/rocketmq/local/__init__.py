"""RocketMQ servers on this machine, to try and to test with."""
