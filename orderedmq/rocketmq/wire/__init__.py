"""RocketMQ's remoting protocol: frames, requests, and the parsing of their answers. Pure."""
