"""The daemon of a soak: hicache with a wall clock that can jump and a disk that can fail.

python -m tests.soak.daemon serve --config FILE
"""

from hicache import cli
from hicache.transfer import worker_process as process
from tests.soak import clock

if __name__ == "__main__":
    clock.install()
    process._MODULE = "tests.soak.worker"
    cli.main()
