"""RocketMQ's remoting protocol: frames, requests, and the content of their answers. Pure."""
