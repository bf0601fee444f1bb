"""What every broker must do. Fixtures of this package end with its last test: servers stop then."""
