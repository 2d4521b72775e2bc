"""What a run needs before its processes start: usable ports, a start policy in RUN/model, prompts in RUN/dataset."""

from __future__ import annotations

import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from areal_dta.config import Config, ConfigError
from launcher import ports
from launcher.local import die_with_parent, kill_group, tail_of
from launcher.plan import prepare_env
from launcher.prepare import check_prepared, count_items
from launcher.rundir import RunDir
from launcher.supervise import StopSignal

__all__ = ["precheck", "prepare_inputs"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CHUNK = 65_536
_POLL_S = 0.5


def precheck(config: Config) -> Path | None:
    """Everything that can be known before a file is written: machine, ports, model.

    Returns the folder of ``actor.path``, None where `prepare` builds the model. Raises ConfigError.
    """
    if config.cluster.n_nodes > 1:
        raise ConfigError(
            f"cluster.n_nodes={config.cluster.n_nodes}: this launcher runs on one machine; set cluster.n_nodes=1"
        )
    _check_host(config.runtime.host)
    ports.check_fixed(config)
    if config.prepare is None:
        _check_datasets(config)
    _check_drafter(config)
    return _model_folder(config)


def _check_host(host: str) -> None:
    """Raise ConfigError unless every process can listen on `host`."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"runtime.host={host} is no IPv4 address of this machine ({error.strerror}); "
                "set runtime.host=127.0.0.1 or an address that this machine has"
            ) from error


def _check_datasets(config: Config) -> None:
    """Without `prepare` the prompts come from files: raise ConfigError where one is named that does not exist."""
    for where, path in _dataset_paths(config).items():
        if (path or where == "train_dataset.path") and not Path(path).expanduser().is_file():
            raise ConfigError(
                f"{where}={path!r} is no file and prepare is not set; "
                "give a jsonl file with one prompt a line, or a prepare function"
            )


def _check_drafter(config: Config) -> None:
    tlt = config.tlt
    if tlt.drafter is not None and not Path(tlt.drafter).is_dir():
        raise ConfigError(f"tlt.drafter={tlt.drafter} is no folder; give one that a drafter was exported to, or null")
    if tlt.draft_ids is not None and not Path(tlt.draft_ids).is_file():
        raise ConfigError(f"tlt.draft_ids={tlt.draft_ids} is no file; give an npy file of target token ids, or null")


def _dataset_paths(config: Config) -> dict[str, str]:
    valid = config.valid_dataset
    return {"train_dataset.path": config.train_dataset.path, "valid_dataset.path": valid.path if valid else ""}


def _model_folder(config: Config) -> Path | None:
    path = config.actor.path
    if not path:
        if config.prepare is None:
            raise ConfigError("actor.path and prepare are both empty; set actor.path to a model folder")
        return None
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"actor.path={path} is a folder without config.json; give a Hugging Face model folder")
        return folder.resolve()
    if not _HUB_NAME.fullmatch(path):
        raise ConfigError(
            f"actor.path={path} does not exist; give a model folder or a hub name such as Qwen/Qwen3-1.7B"
        )
    return _cached_model(path)


def _cached_model(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"actor.path={name} is neither a folder nor in the local model cache; download it first: hf download {name}"
        ) from error


def prepare_inputs(config: Config, run: RunDir, stop_signal: StopSignal, out: TextIO) -> int:
    """Make RUN/model and RUN/dataset once in the life of a run; returns the number of training prompts.

    Tells `out` when there is nothing to evaluate on.

    Raises ConfigError when `prepare` fails, takes longer than ``runtime.prepare_timeout_s``, or leaves too little.
    """
    marker = run.path / "prepared"
    if not marker.exists():
        model = _model_folder(config)
        if config.prepare is not None:
            _run_prepare(config, run, stop_signal, out)
        _copy_datasets(config, run)
        if model is not None and not run.model.exists():
            run.model.symlink_to(model, target_is_directory=True)
    items = check_prepared(run.path, config.train_dataset.batch_size)
    marker.touch()
    eval_file = _eval_file(run)
    if not eval_file.is_file() or not count_items(eval_file):
        print(
            "note: no evaluation: there are no evaluation items; set valid_dataset.path, or have prepare write "
            "dataset/eval.jsonl",
            file=out,
            flush=True,
        )
    return items


def _eval_file(run: RunDir) -> Path:
    return run.train_file.with_name("eval.jsonl")


def _copy_datasets(config: Config, run: RunDir) -> None:
    """Copy the data sets that are files of the user's, unless `prepare` wrote them (its paths may be mere labels)."""
    targets = (run.train_file, _eval_file(run))
    for path, target in zip(_dataset_paths(config).values(), targets, strict=True):
        source = Path(path).expanduser()
        if path and source.is_file() and not target.exists():
            shutil.copyfile(source, target)


def _run_prepare(config: Config, run: RunDir, stop_signal: StopSignal, out: TextIO) -> None:
    """Run `launcher.prepare` alone on the machine, with its output shown and logged."""
    env = {**os.environ, **prepare_env(config)}
    log_path, limit_s = run.log_file("prepare"), config.runtime.prepare_timeout_s
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.prepare", "--run", str(run.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        if not _echo_until_end(process, log_path, limit_s, stop_signal, out):
            raise ConfigError(f"prepare={config.prepare} took longer than runtime.prepare_timeout_s={limit_s:g} s")
    finally:
        kill_group(process.pid)
        code = process.wait(timeout=10)
    if code != 0:
        said = " | ".join(tail_of(log_path)[-3:]) or "it said nothing"
        raise ConfigError(f"prepare={config.prepare} failed with code {code}: {said}; see {log_path}")


def _echo_until_end(
    process: subprocess.Popen[bytes], log_path: Path, limit_s: float, stop_signal: StopSignal, out: TextIO
) -> bool:
    """Copy the output of a process to its log and to `out`; False when the time was up before it ended."""
    assert process.stdout is not None
    pidfd, pipe = os.pidfd_open(process.pid), process.stdout.fileno()
    os.set_blocking(pipe, False)
    poller = select.poll()
    for fd in (pidfd, pipe, stop_signal.fd):
        poller.register(fd, select.POLLIN)
    deadline = time.monotonic() + limit_s
    with log_path.open("ab", buffering=0) as log, process.stdout:
        try:
            while time.monotonic() < deadline:
                ready = {fd for fd, _ in poller.poll(_POLL_S * 1000)}
                stop_signal.check()
                data = _read_some(pipe) if pipe in ready else b""
                if data:
                    log.write(data)
                    out.write(data.decode("utf-8", "replace"))
                    out.flush()
                elif pidfd in ready:
                    return True
                elif pipe in ready:  # it closed its output and goes on
                    poller.unregister(pipe)
            return False
        finally:
            os.close(pidfd)


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return b""
