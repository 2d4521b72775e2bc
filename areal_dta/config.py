"""Load, check and resolve a configuration file without importing AReaL or torch.

A file is AReaL's PPO/GRPO YAML (every key of AReaL 1.0.4 is accepted) plus our sections. The order of work: YAML and
``key=value`` overrides, interpolation, older spellings, derived values, the key table, records, rules.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_dta.config_schema import PPOConfig, RecoverConfig, SaverConfig
from areal_dta.config_schema_alloc import Allocation, parse_allocation
from areal_dta.config_schema_batcher import check_batcher
from areal_dta.config_schema_check import ConfigError, build, fill, sections
from areal_dta.config_schema_effects import effect_notices
from areal_dta.config_schema_legacy import migrate
from areal_dta.config_schema_rules import check_supported, check_values, derive
from areal_dta.config_schema_tau2 import check_tau2, use_scripted_user

__all__ = ["Allocation", "Config", "ConfigError", "load_config", "load_run_config", "make_config", "parse_allocation"]


@dataclass(frozen=True, kw_only=True)
class Config(PPOConfig):
    """A checked configuration. ``raw`` is the resolved mapping: all keys of the records, AReaL's others where given.

    ``notices`` says what was rewritten while loading; two configs are equal when their resolved values are.
    """

    raw: dict[str, Any] = field(repr=False)
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def train_allocation(self) -> Allocation:
        return parse_allocation(self.actor.backend, "actor.backend")

    @property
    def rollout_allocation(self) -> Allocation:
        return parse_allocation(self.rollout.backend, "rollout.backend")

    @property
    def episodes_per_step(self) -> int:
        return self.train_dataset.batch_size * self.gconfig.n_samples

    @property
    def group_timeout_s(self) -> float:
        """Seconds after which an incomplete group is closed: by default, time for all attempts of an episode."""
        given = self.batcher.group_timeout_s
        return self.batcher.max_attempts * self.rollout.request_timeout if given is None else given

    def total_steps(self, num_items: int) -> int:
        """Training steps for a data set of `num_items` prompts; a short last batch of an epoch is dropped."""
        steps = self.total_train_epochs * (num_items // self.train_dataset.batch_size)
        return steps if self.total_train_steps is None else min(steps, self.total_train_steps)

    def checkpoint_intervals(self, num_items: int) -> tuple[int | None, int | None]:
        """Steps and seconds between checkpoints: the shortest of `saver` and, unless disabled, `recover`; None: never.

        Independently of both, the last step is followed by one.
        """
        used: list[SaverConfig | RecoverConfig] = [self.saver, self.recover] if self.recover.enabled else [self.saver]
        steps = [s.freq_steps for s in used if s.freq_steps]
        steps += [s.freq_epochs * self._steps_per_epoch(num_items) for s in used if s.freq_epochs]
        return min(steps, default=None), min((s.freq_secs for s in used if s.freq_secs), default=None)

    def evaluation_due(self, step: int, num_items: int) -> bool:
        """Whether an evaluation follows 0-based training `step` (those before and after training are not meant)."""
        epoch_steps = (self.evaluator.freq_epochs or 0) * self._steps_per_epoch(num_items)
        return any(every and (step + 1) % every == 0 for every in (self.evaluator.freq_steps, epoch_steps))

    def _steps_per_epoch(self, num_items: int) -> int:
        return max(1, num_items // self.train_dataset.batch_size)

    def with_values(self, **values: Any) -> Config:
        """A checked copy with top-level values replaced, e.g. ``config.with_values(trial_name="a")``."""
        return dataclasses.replace(make_config({**self.raw, **values}), notices=self.notices)

    def to_yaml(self) -> str:
        """The resolved mapping as YAML; `load_config` of it gives an equal object."""
        import yaml

        return yaml.safe_dump(self.raw, sort_keys=False, allow_unicode=True)

    def areal_mapping(self) -> dict[str, Any]:
        """The part that AReaL's own PPOConfig accepts, its mandatory names (experiment, trial, fileroot) filled in."""
        names = {
            "experiment_name": self.experiment_name,
            "trial_name": self.trial_name or "trial",
            "fileroot": self.cluster.fileroot,
        }
        return _areal_part(self.raw, "PPOConfig", names)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``key=value`` overrides (AReaL's and Hydra's ``+key=value`` too) and check everything.

    Raises ConfigError naming key, value and remedy.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; give the path of a YAML file")
    try:
        loaded = OmegaConf.load(path)
        if not OmegaConf.is_dict(loaded):
            raise ConfigError(f"{path} must hold a mapping of keys, not {type(loaded).__name__}")
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist([_override(o) for o in overrides]))
        given = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    assert isinstance(given, dict)
    return make_config({str(k): v for k, v in given.items()})


def load_run_config(run_dir: str | Path) -> Config:
    """The resolved configuration of a run directory."""
    return load_config(Path(run_dir) / "config.yaml")


def make_config(given: Mapping[str, Any]) -> Config:
    """Check and resolve a plain mapping (interpolations already resolved). `given` is left alone."""
    migrated, notices = migrate(given)
    derived = derive(migrated, notices)
    use_scripted_user(derived, notices)
    raw = fill(derived)
    check_supported(raw)
    record = build(PPOConfig, raw)
    check_values(record)
    check_batcher(record)
    check_tau2(record)
    notices += effect_notices(raw)
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return Config(**values, raw=raw, notices=tuple(notices))


def _override(text: str) -> str:
    key, sep, value = text.partition("=")
    key = key.lstrip("+")
    if not sep or not key or key.startswith("~"):
        raise ConfigError(f"override {text!r} is not of the form key=value (null switches an optional key off)")
    return f"{key}={value}" if value else f"{key}=''"


def _areal_part(mapping: Mapping[str, Any], section: str, names: Mapping[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, key in sections()[section].items():
        if not key.areal:
            continue
        nested = key.spelled.strip("@?") if key.spelled.startswith("@") else None
        if name in mapping:
            value = mapping[name]
            out[name] = _areal_part(value, nested, names) if nested and value is not None else copy.deepcopy(value)
        elif key.default == "???" and name in names:
            out[name] = names[name]
        elif nested and key.default is not None:
            inner = _areal_part({}, nested, names)
            if inner:
                out[name] = inner
    if "trial_name" in out:
        out["trial_name"] = names["trial_name"]
    return out
