"""TOML files as registry configs of TorchTitan's own entry point, on machines with an accelerator.

`torchrun ... -m torchtitan.train --module torchtitan_dmuon --config FILE.toml` looks up ``FILE.toml`` in this module
and calls what it gets. Decides nothing: the file is read by `titan/toml_config.py`. Keeps: a wrong file ends the
process with code 2 and one line, as with `-m torchtitan_dmuon.train`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[[], Any]:
    if not name.endswith(".toml"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its configs are TOML files")

    def read() -> Any:
        from torchtitan.tools.logging import logger

        from torchtitan_dmuon.titan import checks, toml_config
        from torchtitan_dmuon.titan.config import ConfigError
        from torchtitan_dmuon.titan.platform import PlatformError

        try:
            config = toml_config.load(name).config
        except (ConfigError, PlatformError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        # The other checks need the flags, which TorchTitan applies after this.
        for line in checks.settle(config):
            logger.info(f"config: {line}")
        return config

    return read
