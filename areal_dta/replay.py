"""Train one dumped batch several ways and compare: ``python -m areal_dta.replay TRACE --model FOLDER --dp 2``.

A trace (``RUN/traces/batch_*.npz``, `areal_dta.records.write_trace`) is turned back into one row per turn, cut over the
ranks, and put through AReaL's PPOActor with each ``tree_training_mode``. Loss and gradients must agree; no optimizer
step is made. The result is one JSON line.

Legend of shape suffixes: S rows, T tokens of all rows laid end to end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import areal_dta.areal_env  # noqa: F401

# isort: split
import numpy as np
import torch
import torch.distributed as dist

from areal_dta.bridge import actor_config, batch_of_shard, finetune_spec, make_actor, minibatches
from areal_dta.config import load_config
from areal_dta.records import Shard
from areal_dta.train_engine import DtaTrainEngine, EngineSettings
from areal_dta.tree.cost import TREE_TOKENS
from areal_dta.tree.partition import partition
from areal_dta.tree.trie import sort_rows

__all__ = ["ModeResult", "ReplayReport", "compare", "main", "replay_rank", "shard_of_trace"]

RANK_TIMEOUT_S = 1800.0
DEFAULT_ACTOR: dict[str, Any] = {
    "dtype": "float32",
    "use_decoupled_loss": True,
    "kl_ctl": 0.0,
    "adv_norm": {"mean_level": "batch", "std_level": "batch"},
    "rejection_sampling": {"level": "token", "action": "mask", "metric": "ratio", "upper": 5.0},
    "optimizer": {"lr": 1e-5},
}


@dataclass(frozen=True)
class ModeResult:
    """One mode's outcome: loss, this rank's loss coefficients, full gradients by parameter name."""

    loss: float
    dlogp_T: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @property
    def grad_norm(self) -> float:
        return float(torch.stack([g.double().norm() for g in self.gradients.values()]).norm())


@dataclass(frozen=True)
class ReplayReport:
    """Comparison of each mode with the first one.

    ``gradient_error`` is the worst parameter's, relative in L2. ``loss_error`` is relative to the larger of the loss
    and the sum of |dL/dlogp|, the size of its terms: normalised advantages let them cancel to nearly nothing.
    """

    modes: list[str]
    dp: int
    rows: int
    row_tokens: int
    tree_tokens: int
    losses: list[float]
    grad_norms: list[float]
    loss_error: float
    gradient_error: float
    worst_parameter: str
    clip_flips: int  # loss tokens with a gradient in one mode and none in another, over all ranks


def shard_of_trace(trace: Mapping[str, np.ndarray], rank: int, dp: int) -> Shard:
    """Rank `rank`'s rows of a trace, sorted, cut contiguously over `dp` ranks.

    A row is a turn: the episode's tokens up to the turn's end, with loss on the turn's span. Rewards are the episodes',
    centred by task. Turns whose log-probs the trace does not hold (version -1) get NaN there, to be filled in from the
    forward pass.
    """
    ids, offsets = trace["ids"], trace["offsets"]
    keep = [i for i in range(len(trace["turn_traj"])) if trace["turn_end"][i] > trace["turn_start"][i]]
    if not keep:
        raise ValueError("the trace has no turn with generated tokens; nothing can be trained")
    start = offsets[trace["turn_traj"][keep]]
    lens_S = trace["turn_end"][keep].astype(np.int64)
    offsets_S1 = np.concatenate([[0], np.cumsum(lens_S)])
    take_T = np.repeat(start - offsets_S1[:-1], lens_S) + np.arange(int(offsets_S1[-1]))
    within_T = np.arange(int(offsets_S1[-1])) - np.repeat(offsets_S1[:-1], lens_S)
    loss_T = within_T >= np.repeat(trace["turn_start"][keep], lens_S)
    order = sort_rows(ids[take_T], offsets_S1)
    members = partition("contiguous", order, dp, TREE_TOKENS)[rank]
    chosen = order.order_R[members]
    mine_T = np.concatenate([np.arange(offsets_S1[r], offsets_S1[r + 1]) for r in chosen] or [np.zeros(0, np.int64)])
    episode_S = trace["turn_traj"][keep][chosen]
    versions_T = np.where(loss_T, trace["versions"][take_T], -1)
    known_T = loss_T & (versions_T >= 0)
    _, task = np.unique(trace["task_id"], return_inverse=True)
    mean = np.bincount(task, trace["reward"]) / np.bincount(task)
    return Shard(
        step=0,
        rank=rank,
        world_size=dp,
        epoch=0,
        input_ids_T=ids[take_T][mine_T].astype(np.int32),
        offsets_S1=np.concatenate([[0], np.cumsum(lens_S[chosen])]).astype(np.int64),
        loss_mask_T=loss_T[mine_T].astype(np.uint8),
        logprobs_T=np.where(known_T, trace["logprobs"][take_T], np.nan)[mine_T].astype(np.float32),
        versions_T=versions_T[mine_T].astype(np.int32),
        rewards_S=(trace["reward"] - mean[task])[episode_S].astype(np.float32),
        raw_rewards_S=trace["reward"][episode_S].astype(np.float32),
        group_ids_S=task[episode_S].astype(np.int64),
        samples_S=trace["trial"][episode_S].astype(np.int32),
        launches_S=np.zeros(len(episode_S), np.int32),
        minibatch_S=np.zeros(len(chosen), np.int32),
        num_rows_total=len(keep),
        num_loss_tokens_total=int(loss_T.sum()),
        tree_tokens=order.subset(members).tree_tokens if len(members) else 0,
    )


class _GradientProbe(DtaTrainEngine):
    """Reads the full gradients where the optimizer would step, and steps not."""

    gradients: dict[str, torch.Tensor]

    def optimizer_step(self) -> dict[str, float]:
        self.gradients = {name: gradient.clone() for name, gradient in self.policy.gradients().items()}
        return {"update_successful": 1.0, "grad_norm": 0.0, "lr": 0.0}


def replay_rank(
    trace: Mapping[str, np.ndarray],
    model: Path,
    modes: Sequence[str],
    raw: Mapping[str, Any],
    settings: EngineSettings,
    dp: int,
) -> ReplayReport:
    """One rank of a replay: every mode in turn on the same rows; the report is the same on all ranks."""
    config = actor_config({"actor": {**dict(raw), "path": str(model), "backend": f"megatron:d{dp}"}})
    shard = shard_of_trace(trace, settings.rank or 0, dp)
    results = []
    for mode in modes:
        engine = _GradientProbe(config, dataclasses.replace(settings, mode=mode))
        engine.create_process_group()
        engine.initialize(None, finetune_spec(1))
        results.append(_train(engine, shard))
    return compare(list(modes), results, shard, dp)


def _train(engine: _GradientProbe, shard: Shard) -> ModeResult:
    engine.step.gradient_sync = "full"
    actor = make_actor(engine.config, engine)
    batch = batch_of_shard(shard, engine.policy.device)
    logp_SL = actor.compute_logp([batch])[0]
    batch["prox_logp"] = logp_SL
    unknown_SL = batch["logprobs"].isnan()
    batch["logprobs"] = torch.where(unknown_SL, logp_SL.roll(1, -1), batch["logprobs"])
    batch = actor.compute_advantages([batch])[0]
    (minibatch,) = minibatches(batch, shard.minibatch_S, 1)
    actor.ppo_update([minibatch])
    stats = engine.export_stats()
    assert engine.step.last is not None
    return ModeResult(stats["ppo_actor/update/batch_loss"], engine.step.last[1].dlogp_T, engine.gradients)


def compare(modes: list[str], results: Sequence[ModeResult], shard: Shard, dp: int) -> ReplayReport:
    """The report of a replay; the first mode is the reference. Collective over the default group."""
    first = results[0]
    terms = first.dlogp_T.abs().sum().double()
    dist.all_reduce(terms)
    worst, worst_name, flips, loss_error = 0.0, "", 0, 0.0
    for other in results[1:]:
        loss_error = max(loss_error, abs(other.loss - first.loss) / max(abs(first.loss), float(terms), 1e-12))
        flips += int(((first.dlogp_T == 0) != (other.dlogp_T == 0)).sum())
        for name, gradient in first.gradients.items():
            error = float(
                (other.gradients[name] - gradient).double().norm() / max(float(gradient.double().norm()), 1e-12)
            )
            if error >= worst:
                worst, worst_name = error, name
    totals = torch.tensor([shard.num_rows, int(shard.offsets_S1[-1]), shard.tree_tokens, flips], device=terms.device)
    dist.all_reduce(totals)
    peak = torch.tensor([worst, loss_error], dtype=torch.float64, device=terms.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return ReplayReport(
        modes=modes,
        dp=dp,
        rows=int(totals[0]),
        row_tokens=int(totals[1]),
        tree_tokens=int(totals[2]),
        losses=[r.loss for r in results],
        grad_norms=[r.grad_norm for r in results],
        loss_error=float(peak[1]),
        gradient_error=float(peak[0]),
        worst_parameter=worst_name,
        clip_flips=int(totals[3]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; prints the report as one JSON line. With ``--dp N`` it starts ranks 1 .. N-1 as processes."""
    parser = argparse.ArgumentParser(prog="areal_dta.replay", description="Train one dumped batch in several modes.")
    parser.add_argument("trace", type=Path, help="RUN/traces/batch_*.npz")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of the policy to train")
    parser.add_argument(
        "--config", type=Path, help="RUN/config.yaml for the loss; without it a plain decoupled PPO loss"
    )
    parser.add_argument("--modes", default="disabled,dta", help="comma-separated; the first is the reference")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    port = args.port or _free_port()
    command = [sys.executable, "-m", "areal_dta.replay", *(sys.argv[1:] if argv is None else argv), "--port", str(port)]
    peers = [subprocess.Popen([*command, "--rank", str(r)]) for r in range(1, args.dp)] if args.rank == 0 else []
    try:
        with np.load(args.trace, allow_pickle=False) as file:
            trace = dict(file)
        raw = DEFAULT_ACTOR if args.config is None else load_config(args.config).areal_mapping()["actor"]
        settings = EngineSettings(
            rank=args.rank,
            world_size=args.dp,
            master_addr="127.0.0.1",
            master_port=port,
            timeout_s=RANK_TIMEOUT_S,
            loss_positions_only=True,
        )
        report = replay_rank(trace, args.model, args.modes.split(","), raw, settings, args.dp)
        dist.destroy_process_group()
        codes = [peer.wait(timeout=RANK_TIMEOUT_S) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
    if args.rank == 0:
        print(json.dumps(asdict(report)))
    return max(codes, default=0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
