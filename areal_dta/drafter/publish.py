"""Put a newly trained drafter before the rollout servers: a sealed folder, then a request to each of them.

Runs on a thread of its own, so that training goes on. A server that refuses or is away keeps the drafter it has; that
is reported and nothing more. By hand: ``python -m areal_dta.drafter.publish FOLDER URL...`` (``AREAL_DTA_API_KEY``: the
servers' key); with SGLang not while the policy is being updated.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError

from areal_dta.drafter.coordinator import get_json, post_json
from areal_dta.drafter.eagle import EagleWeights
from areal_dta.drafter.eagle_files import write_drafter
from areal_dta.metrics import Publisher
from areal_dta.weights import TornWeights, VersionManifest, verify

__all__ = ["DrafterPublisher", "main", "newest_drafter", "put_drafter"]

log = logging.getLogger(__name__)
PREFIX = "drafter_"
SGLANG_ALGORITHM = "AREAL_DTA_"  # how the algorithms begin with which an SGLang takes a drafter alone


class DrafterPublisher:
    """Writes ``drafter_<step>`` folders to ``root`` and keeps the newest ``keep``; ``servers``: name to URL."""

    def __init__(
        self,
        root: Path,
        servers: Mapping[str, str],
        metrics: Publisher,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        keep: int = 3,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root, self._servers, self._metrics = root, dict(servers), metrics
        self._api_key, self._timeout_s, self._keep = api_key, timeout_s, keep
        self._thread: threading.Thread | None = None
        self.answers: dict[str, str] = {}  # server -> "ok" or why not, of the last publication

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, weights: EagleWeights, step: int, lineage: str = "") -> bool:
        """Publish ``weights`` (a copy) in the background; False: the publication before is not over.

        ``lineage`` tells apart what was trained twice from the same step, in the drafter's version.
        """
        if self.busy:
            return False
        self._thread = threading.Thread(
            target=self._run, args=(weights, step, lineage), name="drafter-publish", daemon=True
        )
        self._thread.start()
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait for the publication under way; raises TimeoutError."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the drafter was not published within {timeout_s:g} s")

    def _run(self, weights: EagleWeights, step: int, lineage: str) -> None:
        folder = self.root / f"{PREFIX}{step:09d}"
        try:
            manifest = write_drafter(folder, weights, f"d{step}.{lineage[:6]}")
        except (OSError, SafetensorError) as error:
            log.warning("drafter of step %d could not be written: %s", step, error)
            self._metrics.event("drafter/publish_failed", str(error), step=step)
            return
        self.announce(folder, manifest)
        for old in drafter_folders(self.root)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def announce(self, folder: Path, manifest: VersionManifest) -> None:
        """Tell every server about ``folder``, all at once; each has ``timeout_s``. Refusals are reported."""
        start_s = time.monotonic()

        def tell(url: str) -> str:
            try:
                put_drafter(url, folder, manifest, self._api_key, self._timeout_s)
            except (OSError, ValueError) as error:
                return str(error)
            return "ok"

        with ThreadPoolExecutor(max(1, len(self._servers))) as pool:
            answers = dict(zip(self._servers, pool.map(tell, self._servers.values()), strict=True))
        self.answers = answers
        for server, answer in answers.items():
            if answer != "ok":
                log.warning("%s keeps its drafter: %s", server, answer)
                self._metrics.event("drafter/refused", answer, server=server, version=manifest.weight_version)
        accepted = [s for s, answer in answers.items() if answer == "ok"]
        self._metrics.event("drafter/published", ",".join(accepted), version=manifest.weight_version)
        self._metrics.emit("drafter/publish_s", time.monotonic() - start_s, version=manifest.weight_version)


def put_drafter(
    url: str, folder: Path, manifest: VersionManifest, api_key: str | None = None, timeout_s: float = 10.0
) -> None:
    """Give the drafter in ``folder`` to one server, embedded or SGLang; raises OSError, or ValueError if it refuses."""
    url = url.rstrip("/")
    body = {"model_path": str(folder), "drafter_version": manifest.weight_version, "digest": manifest.digest}
    try:
        post_json(f"{url}/update_drafter_from_disk", body, api_key, timeout_s)
    except ValueError as error:
        if "answered 404" not in str(error):
            raise
        _put_into_sglang(url, folder, api_key, timeout_s)


def _put_into_sglang(url: str, folder: Path, api_key: str | None, timeout_s: float) -> None:
    """With our plugin a drafter's folder reaches the drafter only; otherwise the policy would be loaded from it."""
    info = get_json(f"{url}/server_info", api_key, timeout_s)
    algorithm = info.get("speculative_algorithm")
    if not str(algorithm).startswith(SGLANG_ALGORITHM):
        raise ValueError(
            f"SGLang {info.get('version')} at {url} takes a drafter at its start only (speculative_algorithm is "
            f"{algorithm}); start it again with tlt.drafter={folder}"
        )
    # Not paused, it would first let all running requests end, and hold new ones meanwhile.
    post_json(f"{url}/pause_generation", {"mode": "in_place"}, api_key, timeout_s)
    try:
        body = {"model_path": str(folder), "flush_cache": False}
        post_json(f"{url}/update_weights_from_disk", body, api_key, timeout_s)
    finally:
        post_json(f"{url}/continue_generation", {}, api_key, timeout_s)


def drafter_folders(root: Path) -> list[Path]:
    return sorted(p for p in root.glob(f"{PREFIX}*") if p.is_dir())


def newest_drafter(root: Path) -> Path | None:
    """The newest published folder that is whole; torn ones are passed over with a warning."""
    for folder in reversed(drafter_folders(root)):
        try:
            verify(folder)
        except (TornWeights, OSError) as error:
            log.warning("%s is not used: %s", folder, error)
            continue
        return folder
    return None


def main(argv: list[str] | None = None) -> int:
    """Give one drafter to servers; exit code 1 when one of them does not take it, 2 when there is none."""
    parser = argparse.ArgumentParser(prog="python -m areal_dta.drafter.publish", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("url", nargs="+")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    args = parser.parse_args(argv)
    try:
        manifest = verify(args.folder)
    except (TornWeights, OSError) as error:
        print(f"{args.folder} holds no drafter: {error}", file=sys.stderr)
        return 2
    refused = 0
    for url in args.url:
        try:
            put_drafter(url, args.folder.absolute(), manifest, os.environ.get("AREAL_DTA_API_KEY"), args.timeout_s)
        except (OSError, ValueError) as error:
            print(f"{url} keeps its drafter: {error}", file=sys.stderr)
            refused = 1
        else:
            print(f"{url} has {manifest.weight_version}")
    return refused


if __name__ == "__main__":
    sys.exit(main())
