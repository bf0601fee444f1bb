"""The RocketMQ broker: a client of the remoting protocol of 4.9.x and 5.x clusters."""
