"""Many real clients, one daemon, and random failures of all of them: `make soak`."""
