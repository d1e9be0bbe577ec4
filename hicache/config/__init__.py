"""The YAML configuration: read, checked, explained, compared. Used by commands and the daemon.

Doors: `load_config` (a file to a `Config`; every mistake as a sentence with its line),
`resolve_sizes` and `check_against_machine` (sizes in bytes, problems), `key_table` (the reference).
"""

from hicache.config.display import key_table, key_table_markdown, plain_value, shown_values
from hicache.config.fields import Surroundings
from hicache.config.live import LiveDiff, diff_live, with_live
from hicache.config.loading import LoadedConfig, effective_values, load_config, parse_config
from hicache.config.machine import (
    MachineProbe,
    Problem,
    Volume,
    check_against_machine,
    probe_machine,
    resolve_sizes,
)
from hicache.config.messages_for_people import ConfigError, Mistake
from hicache.config.models import (
    Config,
    DeadlinesConfig,
    DiskConfig,
    DramConfig,
    HbmConfig,
    LimitsConfig,
    PlannerConfig,
    SocketConfig,
    TierConfig,
    TiersConfig,
    VolumeTierConfig,
    config_model,
)
from hicache.config.units import Share, format_seconds, format_size, parse_seconds, parse_size

__all__ = [
    "Config",
    "ConfigError",
    "DeadlinesConfig",
    "DiskConfig",
    "DramConfig",
    "HbmConfig",
    "LimitsConfig",
    "LiveDiff",
    "LoadedConfig",
    "MachineProbe",
    "Mistake",
    "PlannerConfig",
    "Problem",
    "Share",
    "SocketConfig",
    "Surroundings",
    "TierConfig",
    "TiersConfig",
    "Volume",
    "VolumeTierConfig",
    "check_against_machine",
    "config_model",
    "diff_live",
    "effective_values",
    "format_seconds",
    "format_size",
    "key_table",
    "key_table_markdown",
    "load_config",
    "parse_config",
    "parse_seconds",
    "parse_size",
    "plain_value",
    "probe_machine",
    "resolve_sizes",
    "shown_values",
    "with_live",
]
