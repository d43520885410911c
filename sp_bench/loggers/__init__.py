"""Loggers: where benchmark records go besides their files. That is Weights & Biases, or nowhere.

A logger that is missing, slow or broken never fails or slows a benchmark: its error is one line at the end. This
package imports no wandb; a process of its own does (`wandb_writer`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from sp_bench.errors import unknown
from sp_bench.loggers.logger import Logger
from sp_bench.loggers.wandb_client import WandbLogger, WandbSettings
from sp_bench.reading import read

__all__ = ["Logger", "logger_by_default", "open_logger", "wandb_is_disabled"]

ASKS = ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_MODE")
"""Variables of W&B that ask for it: with one of them set and wandb installed it is the default logger."""


def wandb_is_disabled() -> bool:
    """Whether W&B's own variable says that nothing is written or sent."""
    return os.environ.get("WANDB_MODE") == "disabled"


def logger_by_default() -> str:
    """The name of the logger of a point that names none."""
    asked = any(os.environ.get(name) for name in ASKS) and not wandb_is_disabled()
    spec = find_spec("wandb") if asked else None
    # A folder with W&B's runs is named wandb too: Python takes it for a package, without a file.
    return "wandb" if spec and spec.origin else "none"


def open_logger(settings: Mapping[str, Any]) -> Logger:
    """The logger that `settings` (conf/logger/*.yaml) describe: its `name`, and the fields of `WandbSettings`.

    Open it before the benchmark computes: wandb takes a second to load meanwhile. Raises RequestError for an unknown
    logger, an unknown key or an invalid value. WANDB_MODE=disabled is no logger.
    """
    options = {key: value for key, value in settings.items() if key != "name"}
    match settings.get("name"):
        case "none":
            return Logger()
        case "wandb" if options.get("mode", os.environ.get("WANDB_MODE")) == "disabled":
            read(WandbSettings, {**options, "mode": "offline"}, "logger")
            return Logger()
        case "wandb":
            return WandbLogger(read(WandbSettings, options, "logger"))
        case name:
            raise unknown("logger", str(name), ("none", "wandb"))
