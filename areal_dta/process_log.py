"""Logging of the processes that load AReaL: plain lines on stdout, whatever AReaL does to the logging module.

AReaL replaces the root logger whenever one of its modules asks for a logger, which orphans every logger made before:
they have a root without handlers and say nothing below WARNING. So each of our loggers gets the handler itself.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["set_up_logging"]

PACKAGES = ("areal_dta", "experiments")


def set_up_logging() -> None:
    """Give every logger that a loaded module of ours holds one handler for INFO and above; idempotent."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for logger in _our_loggers():
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.disabled = False


def _our_loggers() -> list[logging.Logger]:
    modules = [m for name, m in sys.modules.items() if name == "__main__" or name.partition(".")[0] in PACKAGES]
    return [value for m in modules for value in vars(m).values() if isinstance(value, logging.Logger)]
