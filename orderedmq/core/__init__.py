"""The rules: offsets, locks, ownership, listeners, routing. Pure: no socket, file, clock or thread."""
