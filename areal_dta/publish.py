"""Put new weights before the rollout servers: a version folder and a request to the router; no torch, no AReaL."""

from __future__ import annotations

import http.client
import json
import logging
import os
import shutil
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from areal_dta.weights import seal_version

__all__ = [
    "PublishError",
    "Published",
    "finish_version",
    "prune_versions",
    "publish_until",
    "publish_version",
    "staging_folder",
]

log = logging.getLogger(__name__)
RETRY_S = 0.5


class PublishError(RuntimeError):
    """No server serves the new version; the old one is still served. ``retry``: a later attempt may succeed."""

    def __init__(self, message: str, retry: bool = True) -> None:
        super().__init__(message)
        self.retry = retry


@dataclass(frozen=True)
class Published:
    """The router's answer: which server now serves which version, and what it cost in seconds."""

    servers: dict[str, str] = field(default_factory=dict)
    pause_s: float = 0.0
    update_s: float = 0.0


def publish_version(
    router: str, model_path: str, weight_version: str, digest: str, *, timeout_s: float, api_key: str | None = None
) -> Published:
    """``POST {router}/publish``; returns once at least one server serves ``weight_version``.

    Raises PublishError when the router refuses, fails, is out of reach or silent for ``timeout_s``. Repeating a request
    is safe.
    """
    body = {"model_path": model_path, "weight_version": weight_version, "digest": digest}
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(f"{router.rstrip('/')}/publish", json.dumps(body).encode(), headers, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback or cluster-internal, never a proxy
    where = f"router {router}, version {weight_version}"
    try:
        with opener.open(request, timeout=timeout_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode(errors="replace").strip()
        raise PublishError(f"{where}: answered {error.code}: {text}", retry=error.code >= 500) from error
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise PublishError(f"{where}: {type(error).__name__}: {error}") from error
    if not answer.get("success"):
        raise PublishError(f"{where}: {answer.get('message') or answer}")
    return Published(
        servers={str(k): str(v) for k, v in (answer.get("servers") or {}).items()},
        pause_s=float(answer.get("pause_s") or 0.0),
        update_s=float(answer.get("update_s") or 0.0),
    )


def publish_until(
    router: str, model_path: str, weight_version: str, digest: str, *, timeout_s: float, api_key: str | None = None
) -> Published:
    """`publish_version`, repeated while router or servers are away (restarting), at most ``timeout_s`` in all."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return publish_version(
                router, model_path, weight_version, digest, timeout_s=max(left_s, RETRY_S), api_key=api_key
            )
        except PublishError as error:
            if not error.retry:
                raise
            if time.monotonic() + RETRY_S >= deadline:
                raise PublishError(
                    f"nobody served the new version within {timeout_s:g} s; last answer: {error}"
                ) from error
            log.warning("will try again: %s", error)
            time.sleep(RETRY_S)


def staging_folder(folder: Path, clean: bool) -> Path:
    """Where version `folder` is written first; `clean` (the writing rank) clears the debris of a crash."""
    staging = folder.with_name(f"{folder.name}.partial")
    if clean:
        shutil.rmtree(staging, ignore_errors=True)
    return staging


def finish_version(staging: Path, folder: Path, weight_version: str) -> str:
    """Turn the complete weight files in `staging` into version folder `folder` by one rename; returns the digest."""
    manifest = seal_version(staging, weight_version)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(staging, folder)
    return manifest.digest


def prune_versions(root: Path, keep: int) -> None:
    """Delete all but the `keep` newest version folders of `root` (servers may still be loading the last ones), and what
    crashes during a publish left. Not to be called while a version is being written.
    """
    for debris in root.glob("e*_v*.partial"):
        shutil.rmtree(debris, ignore_errors=True)
    folders = sorted(p for p in root.glob("e*_v*") if p.is_dir() and not p.name.endswith(".partial"))
    for folder in sorted(folders, key=lambda p: _version_key(p.name))[: max(0, len(folders) - keep)]:
        shutil.rmtree(folder, ignore_errors=True)


def _version_key(name: str) -> tuple[int, int]:
    epoch, _, number = name.removeprefix("e").partition("_v")
    return (int(epoch), int(number)) if epoch.isdigit() and number.isdigit() else (-1, -1)
