"""TCP ports: fixed ones are checked before anything starts, the others are picked among the free ones."""

from __future__ import annotations

import contextlib
import socket

from areal_dta.config import Config, ConfigError

__all__ = ["check_fixed", "fixed_ports", "pick_free"]


def fixed_ports(config: Config) -> dict[str, int]:
    """The ports that the configuration fixes, by key."""
    named = {f"embedded.ports[{i}]": port for i, port in enumerate(config.embedded.ports)}
    named |= {"batcher.port": config.batcher.port, "runtime.router_port": config.runtime.router_port}
    return {key: port for key, port in named.items() if port}


def check_fixed(config: Config) -> None:
    """Raise ConfigError when a fixed port cannot be bound on ``runtime.host``."""
    for key, port in fixed_ports(config).items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.runtime.host, port))
            except OSError as error:
                raise ConfigError(
                    f"{key}={port} cannot be used on {config.runtime.host}: {error.strerror}; "
                    f"free it or set {key.partition('[')[0]} to another port (0 or empty: any free one)"
                ) from error


def pick_free(count: int, host: str, taken: set[int]) -> list[int]:
    """`count` different free ports outside `taken`; all are held while choosing, so that none is picked twice."""
    chosen: list[int] = []
    with contextlib.ExitStack() as held:
        while len(chosen) < count:
            probe = held.enter_context(socket.socket())
            probe.bind((host, 0))
            port = probe.getsockname()[1]
            if port not in taken:
                chosen.append(port)
    return chosen
