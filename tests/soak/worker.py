"""A worker of a soak's daemon: one whose system calls may fail, with the daemon's jumping clock.

python -m tests.soak.worker FD            run by tests/soak/daemon.py
"""

import sys

from tests.e2e import faulty_worker
from tests.soak import clock

if __name__ == "__main__":
    clock.install()
    sys.exit(faulty_worker.main(int(sys.argv[1])))
