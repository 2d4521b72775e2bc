"""`areal-dta plan TRACE`: the tree of a trace and what training on it will cost, rank by rank. Needs no torch.

With a configuration file instead of a trace it shows what `areal-dta run CONFIG --dry-run` shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from areal_dta.config import ConfigError
from areal_dta.config_schema_check import parse_bytes
from areal_dta.tree.calibration import Calibration
from areal_dta.tree.cost import lower_bound
from areal_dta.tree.partition import DEFAULT_METHOD
from areal_dta.tree.plan import PlanKind, PlanSettings
from areal_dta.tree.sizes import ModelSizes
from areal_dta.tree.trie import sort_rows
from launcher.commands import run
from launcher.rundir import RunError
from launcher.simulate_command import simulate_config, table
from launcher.trace_plan import Models, RankPlan, TreeFigures, models_of, plan_ranks, read_calibration, tree_figures
from launcher.trace_rows import read_rows

__all__ = ["plan"]

_CONFIG_SUFFIXES = (".yaml", ".yml")
_SIMULATION_OPTIONS = ("from_run", "trace", "assume", "search", "steps")
_TRACE_OPTIONS = (
    "ranks", "partition", "model", "plan", "max_block_tokens", "activation_budget", "calibration", "rows", "where",
    "dtype", "tp", "pp", "order", "no_cut_tail", "no_leaf_merge", "compare",
)  # fmt: skip
_ESTIMATE_OPTIONS = ("dtype", "tp", "pp")


def plan(args: argparse.Namespace) -> int:
    """Decides by file type; raises RunError or ConfigError for what cannot be planned."""
    path: Path = args.file
    if not path.is_file():
        raise RunError(f"{path} does not exist; give a trace (.npz) or a configuration (.yaml)")
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    is_config = path.suffix in _CONFIG_SUFFIXES and not is_zip
    if args.simulate:
        if not is_config:
            raise RunError(f"--simulate is for configurations (.yaml), {path} is none; give the trace with --trace")
        others = [name for name in _TRACE_OPTIONS if name not in ("model", "calibration")]
        _refuse(args, others, "is for traces; with --simulate give key=value or --assume")
        return simulate_config(args)
    _refuse(args, _SIMULATION_OPTIONS, "is for simulations; add --simulate")
    if is_config:
        _refuse(args, _TRACE_OPTIONS, f"is for traces; {path} is a configuration, give key=value")
        return run(path, args.overrides, True, args.json, None, False)
    if path.suffix != ".npz" and not is_zip:
        raise RunError(f"{path} is neither a trace (.npz) nor a configuration (.yaml); give one of them")
    if args.overrides:
        raise RunError(f"{args.overrides[0]}: key=value is for configurations; {path} is a trace, give options")
    try:
        report = _report(args)
    except ValueError as error:  # a partition, a budget or a file that cannot be used; the messages say what to change
        raise error if isinstance(error, ConfigError) else RunError(str(error)) from error
    print(json.dumps(dataclasses.asdict(report)) if args.json else _text(report))
    return 0


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise RunError if one of these options was given."""
    for name in names:
        if getattr(args, name):
            raise RunError(f"--{name.replace('_', '-')} {why}")


@dataclass(frozen=True)
class _Report:
    """Everything that is printed. ``basis`` says where seconds and bytes come from."""

    trace: str
    settings: dict[str, Any]
    partition: str
    basis: str
    tree: TreeFigures
    ranks: list[RankPlan]
    over_mean: float  # cost of the heaviest rank against the mean of all
    over_bound: float  # and against what no partition can undercut
    comparison: dict[str, list[RankPlan] | None]  # None: see `over_budget`
    over_budget: dict[str, str]  # kinds that need more than the activation budget, and what the planner says about it
    notes: list[str]


def _report(args: argparse.Namespace) -> _Report:
    settings = PlanSettings(
        kind=args.plan or "auto",
        max_block_tokens=args.max_block_tokens or PlanSettings().max_block_tokens,
        activation_budget=parse_bytes(args.activation_budget or 0, "--activation-budget"),
        leaf_merge=not args.no_leaf_merge,
        cut_tail=not args.no_cut_tail,
        order=args.order or PlanSettings().order,
    )
    calibration, models, basis = _models(args)
    if settings.activation_budget and models.memory is None:
        raise RunError("--activation-budget needs bytes per token; add --model FOLDER or --calibration FILE")
    rows = read_rows(args.file, args.rows or "auto", args.where)
    order = sort_rows(rows.ids_T, rows.offsets_S1)
    method, num_ranks = args.partition or DEFAULT_METHOD, args.ranks or 1
    chosen = plan_ranks(rows, order, num_ranks, method, settings, models)
    plans: dict[str, list[RankPlan] | None] = {_name(settings): chosen}
    over_budget: dict[str, str] = {}
    for other in _alternatives(settings) if args.compare else ():
        try:
            plans[_name(other)] = plan_ranks(rows, order, num_ranks, method, other, models)
        except ValueError as error:  # rows and partition have been used above: only the budget can be too small
            plans[_name(other)] = None
            over_budget[_name(other)] = str(error)
    costs = [rank.cost for rank in chosen]
    return _Report(
        trace=str(args.file),
        settings=dataclasses.asdict(settings),
        partition=method,
        basis=basis,
        tree=tree_figures(rows, order, models.flops),
        ranks=chosen,
        over_mean=max(costs) * len(costs) / sum(costs),
        over_bound=max(costs) / lower_bound(order, num_ranks, models.balance)[0],
        comparison=plans if args.compare else {},
        over_budget=over_budget,
        notes=[] if calibration is None else _notes(plans, calibration),
    )


def _notes(plans: dict[str, list[RankPlan] | None], calibration: Calibration) -> list[str]:
    largest = {name: max(rank.largest_block for rank in ranks) for name, ranks in plans.items() if ranks}
    beyond = {name: calibration.extrapolation(tokens) for name, tokens in largest.items()}
    return [f"plan {name}: {what}; its time and peak may be far off" for name, what in beyond.items() if what]


def _name(settings: PlanSettings) -> str:
    """Of a plan in the comparison."""
    return settings.kind if settings.leaf_merge else "rows alone"


def _alternatives(settings: PlanSettings) -> list[PlanSettings]:
    """The other kinds of plan, and training every row alone."""
    plain = dataclasses.replace(settings, kind="dense", leaf_merge=True, cut_tail=True)
    every = [dataclasses.replace(plain, kind=kind) for kind in get_args(PlanKind)]
    every.append(dataclasses.replace(plain, leaf_merge=False))
    return [other for other in every if _name(other) != _name(settings)]


def _models(args: argparse.Namespace) -> tuple[Calibration | None, Models, str]:
    if args.calibration:
        why = f"is for estimates; {args.calibration} holds measurements, remove one of them"
        _refuse(args, _ESTIMATE_OPTIONS, why)
    if not args.model:
        _refuse(args, _ESTIMATE_OPTIONS, "is for estimates; add --model FOLDER (config.json is enough)")
    sizes = ModelSizes.from_folder(args.model) if args.model else None
    calibration = read_calibration(args.calibration) if args.calibration else None
    models = models_of(sizes, calibration, args.dtype, args.tp or 1, args.pp or 1)
    if calibration is not None:
        fingerprint = calibration.fingerprint
        basis = f"measured on {fingerprint.get('device', '?')}, {fingerprint.get('dtype', '?')}"
    elif sizes is None:
        basis = "give --model FOLDER (config.json is enough) or --calibration FILE for FLOP, seconds and bytes"
    else:
        basis = "estimated from the model's shape: compare plans by it, don't expect these seconds"
    return calibration, models, basis


# ---- text ----


def _text(report: _Report) -> str:
    tree, settings = report.tree, report.settings
    limit = "" if tree.flop_limit is None else f"   FLOP limit {tree.flop_limit:.2f} x (no walk can gain more)"
    budget = _bytes(settings["activation_budget"]) if settings["activation_budget"] else "automatic"
    lines = [
        f"{report.trace}: {tree.rows} rows of {tree.episodes} episodes",
        f"  row tokens   {tree.row_tokens:>12,}   of them with loss {tree.loss_tokens:,}",
        f"  tree tokens  {tree.tree_tokens:>12,}   {tree.token_ratio:.2f} x fewer{limit}",
        f"  depth        {tree.longest_row:>12,}   mean row {tree.mean_row:,.0f} tokens",
        f"  segments     {tree.segments:>12,}   {tree.leaves:,} leaves",
        "",
        f"plan {settings['kind']}{_variant(settings)}, blocks of at most {settings['max_block_tokens']} tokens, "
        f"budget {budget}; {len(report.ranks)} rank{'s' * (len(report.ranks) > 1)} by {report.partition}",
        *table([("rank", *_HEAD), *((str(k), *_cells(rank)) for k, rank in enumerate(report.ranks))]),
    ]
    if len(report.ranks) > 1:
        lines.append(f"heaviest rank: {report.over_mean:.3f} x the mean, {report.over_bound:.3f} x the lower bound")
    stages = max((rank.stage_peak_bytes or [] for rank in report.ranks), key=lambda peaks: max(peaks, default=0.0))
    if len(stages) > 1:
        lines.append(f"peak of {len(stages)} stages (hungriest rank): {', '.join(_bytes(peak) for peak in stages)}")
    if report.comparison:
        lines += ["", "plans compared (slowest and hungriest rank)", *_comparison(report.comparison)]
    return "\n".join([*lines, "", f"time and peak: {report.basis}", *report.notes])


def _variant(settings: dict[str, Any]) -> str:
    """Settings that are not the defaults."""
    usual = dataclasses.asdict(PlanSettings())
    names = ("order", "cut_tail", "leaf_merge")
    changed = [f"{name}={settings[name]}" for name in names if settings[name] != usual[name]]
    return f" ({', '.join(changed)})" if changed else ""


_HEAD = ("rows", "row tokens", "tree tokens", "computed", "blocks", "tiles", "kept", "recomputed", "time", "peak")


def _cells(rank: RankPlan) -> tuple[str, ...]:
    counts = (
        rank.rows, rank.row_tokens, rank.tree_tokens, rank.computed_tokens, rank.blocks, rank.tiles, rank.kept_tokens,
        rank.recomputed_tokens,
    )  # fmt: skip
    return (*(f"{count:,}" for count in counts), _seconds(rank.seconds), _bytes(rank.peak_bytes))


def _comparison(plans: dict[str, list[RankPlan] | None]) -> list[str]:
    rows: list[tuple[str, ...]] = [("plan", "computed", "recomputed", "blocks", "tiles", "time", "peak", "planning")]
    over: list[str] = []
    for kind, ranks in plans.items():
        if ranks is None:
            over.append(f"  {kind}: exceeds the budget")
            continue
        counts = (
            sum(getattr(r, n) for r in ranks) for n in ("computed_tokens", "recomputed_tokens", "blocks", "tiles")
        )
        seconds, peak = (_largest([getattr(r, n) for r in ranks]) for n in ("seconds", "peak_bytes"))
        cells = (*(f"{count:,}" for count in counts), _seconds(seconds), _bytes(peak))
        rows.append((kind, *cells, _seconds(max(r.plan_s for r in ranks))))
    return [*table(rows), *over]


def _largest(values: Sequence[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:,.1f} s"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    power = next((p for p in (4, 3, 2, 1) if value >= 1024**p), 0)
    return f"{value / 1024**power:,.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
