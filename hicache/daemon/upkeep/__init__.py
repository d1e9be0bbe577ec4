"""What the daemon does beside requests: health, restores, scrubs, traces, refits, memory.

Called from `daemon.loop`, mostly once a tick. A failure here is counted; no request fails by it.
"""
