"""Many real clients, one daemon, and everything that can happen to them: `make soak`."""
