"""One file per command of `hicache`; each is imported only when its command runs."""
