"""What the daemon does beside requests: health, restores, scrubs, traces, refits, memory.

Doors: one class a file, called from `daemon.loop`, mostly once a tick. A failure here is counted;
it fails no request.
"""
