"""What the command does, apart from showing it."""
