"""The current configuration, and its reload while the daemon serves."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hicache.config import Config, ConfigError, LoadedConfig, diff_live, with_live
from hicache.config.live import LiveDiff

log = logging.getLogger("hicache")


class ServingConfig:
    """`load` reads the named file, or the one used at the start if the name is empty; `apply`
    passes a changed configuration to the parts that use it."""

    def __init__(
        self,
        config: Config,
        load: Callable[[str], LoadedConfig],
        apply: Callable[[Config], None],
    ) -> None:
        self.config = config
        self._load, self._apply = load, apply

    def reload(self, file: str = "") -> LiveDiff:
        """Apply what can change live; other keys keep their values until a restart. Raises
        ConfigError with every mistake of the file, and changes nothing."""
        config = self._load(file).config
        changed = diff_live(self.config, config)
        if changed.live:
            self.config = with_live(self.config, config)
            self._apply(self.config)
        return changed

    def reload_or_log(self) -> None:
        """Reload on a signal: mistakes in the file are logged."""
        try:
            changed = self.reload()
        except (ConfigError, OSError, ValueError, RecursionError) as error:
            log.error("the configuration was not reloaded: %s", error)
            return
        log.info("applied: %s", ", ".join(changed.live) or "nothing")
        if changed.restart:
            log.warning("needs a restart: %s", ", ".join(changed.restart))
