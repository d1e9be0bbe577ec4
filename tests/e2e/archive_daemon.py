"""A command line that knows one more kind of tier, run by tests/e2e/test_fourth_tier.py:

python -m tests.e2e.archive_daemon serve --config FILE
"""

from hicache import cli
from hicache.tiers import catalog
from hicache.tiers.tier import TierKind
from tests.e2e.archive_tier import TRAITS

ARCHIVE = TierKind(
    "archive",
    rank=40,
    traits=TRAITS,
    section="tests.e2e.archive_tier:ArchiveConfig",
    builder="tests.e2e.archive_tier:open_archive",
    event_medium="REMOTE",
    summary="Files in a folder that hosts share.",
    codec="tests.transfer.media.sealed_codec:SealedCodec",
)

if __name__ == "__main__":
    catalog.register(ARCHIVE)
    cli.main()
