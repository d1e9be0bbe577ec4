"""A daemon whose workers are `tests.e2e.faulty_worker`, run by tests/e2e/test_faults.py:

python -m tests.e2e.faulty_daemon serve --config FILE
"""

from hicache import cli
from hicache.transfer import worker_process as process

if __name__ == "__main__":
    process._MODULE = "tests.e2e.faulty_worker"
    cli.main()
