"""A run directory as a real run would leave it, from a seed: 20 steps, 2 ranks, a server that dies, rejections."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

from areal_dta.metrics import MetricRecord

STEPS, RANKS, WORKERS, SERVERS = 20, 2, 2, 1
START_T = 1_780_000_000.0
CONFIG = """\
experiment_name: tau2-mock
trial_name: synthetic
total_train_steps: {steps}
rollout:
  backend: embedded:d1
  max_head_offpolicyness: 2
tlt:
  enabled: true
  train: true
batcher:
  cost: flops
  staleness_policy: wait
"""
ARMS = {"ngram-d3-k1-v3": 0.6, "off": 0.3, "eagle-d4-k2-v7": 0.1}  # share of the time
CAUSES = ("raised", "timeout", "bad_reward")


class Story:
    """Emits records in the order of their times; every process of the run has its say."""

    def __init__(self, seed: int, steps: int) -> None:
        self.random = random.Random(seed)
        self.steps = steps
        self.t = START_T
        self.generated = 0.0
        self.rejected = dict.fromkeys(CAUSES, 0)
        self.speculation = Speculation(self)

    def record(self, proc: str, name: str, value: float | None, step: int | None = None, **labels) -> MetricRecord:
        kind = "span" if name.startswith("time/") else "value"
        return MetricRecord(self.t, proc, kind, name, value, step, labels)

    def event(self, name: str, message: str = "", **labels) -> MetricRecord:
        return MetricRecord(self.t, "launcher", "event", name, None, None, labels, message or None)

    def records(self) -> Iterator[MetricRecord]:
        yield self.event("run/phase", "waiting for server.0")
        names = [f"server.{i}" for i in range(SERVERS)] + ["batcher"] + [f"trainer.{r}" for r in range(RANKS)]
        for pid, name in enumerate([*names, "router", *(f"worker.{i}" for i in range(WORKERS))]):
            self.t += 0.4
            yield self.event("process/start", process=name, pid=4100 + pid)
        yield self.event("run/phase", "waiting for the trainer")
        yield from self.rollout(seconds=6.0, reward=0.4, version=0)
        yield self.record("trainer.0", "eval/reward", 0.333, 0, tag="before")
        for step in range(self.steps):
            yield from self.step(step)
        yield from self.rollout(seconds=4.0, reward=0.95, version=self.steps)
        yield self.record("trainer.0", "eval/reward", 0.944, self.steps, tag="after")

    def rollout(self, seconds: float, reward: float, version: int) -> Iterator[MetricRecord]:
        """Two reports a second of the server and the batcher, an episode now and then."""
        for _ in range(max(1, int(seconds * 2))):
            self.t += 0.5
            rate = self.random.gauss(900, 60)
            self.generated += rate * 0.5
            running = self.random.randint(18, 24)
            yield self.record("server.0", "server/generated_tokens", round(self.generated))
            yield self.record("server.0", "server/tokens_per_s", rate)
            yield self.record("server.0", "server/running", running)
            yield self.record("server.0", "server/waiting", max(0, running - 20))
            yield from self.speculation.report(0.5, rate * 0.5)
            yield self.record("batcher", "batch/in_flight", 24 + self.random.randint(-3, 3))
            yield self.record("batcher", "batch/ready", self.random.randint(0, 4))
            worker = f"worker.{self.random.randrange(WORKERS)}"
            yield self.record(worker, "rollout/reward", float(self.random.random() < reward))
            yield self.record(worker, "rollout/episode_s", self.random.gauss(2.4, 0.4))
            yield self.record(worker, "rollout/turns", self.random.randint(2, 4))

    def step(self, step: int) -> Iterator[MetricRecord]:
        noise = self.random.gauss
        reward = min(1.0, 0.36 + 0.56 / (1 + math.exp(-(step - 8) / 2.2)) + noise(0, 0.03))
        wait_s = max(0.2, noise(5.0 if step % 6 else 2.0, 0.6))
        began = self.t
        yield from self.rollout(wait_s, reward, step)
        if step == 7:
            yield self.event("process/exit", "was killed by signal 9 (SIGKILL)", process="server.0", code=-9)
            self.t += 1.0
            yield self.event("process/restart", process="server.0", pid=4190, restarts=1)
            self.generated = 0.0
            self.speculation = Speculation(self)
        yield from self.batch(step, reward)
        yield from self.train(step, wait_s, began)

    def batch(self, step: int, reward: float) -> Iterator[MetricRecord]:
        noise, tokens = self.random.gauss, 150_000 + int(self.random.gauss(0, 8000))
        if self.random.random() < 0.4:
            self.rejected[self.random.choice(CAUSES)] += 1
        values = {
            "batch/reward_mean": reward,
            "batch/episodes": 72,
            "batch/tokens": tokens,
            "batch/tree_tokens": tokens / noise(11.5, 0.3),
            "batch/tree_ratio": noise(11.5, 0.3),
            "batch/staleness_max": min(step, self.random.choice([1, 1, 2])),
            "batch/staleness_mean": min(step, 0.7) * self.random.random(),
            "batch/mixed_version_share": 0.1 * (step > 0),
        }
        for name, value in values.items():
            yield self.record("batcher", name, value, step)
        for cause, count in self.rejected.items():
            yield self.record("batcher", "batch/rejected", count, step, cause=cause)
        for rank in range(RANKS):
            yield self.record("batcher", "batch/rank_cost", 2.1e11 * (1 + 0.04 * noise(0, 1)), step, rank=rank)
        yield self.record("batcher", "time/assemble", 0.12, step)

    def train(self, step: int, wait_s: float, began: float) -> Iterator[MetricRecord]:
        noise = self.random.gauss
        spans = {"logprob": noise(2.1, 0.1), "advantages": 0.05, "update": noise(4.4, 0.2), "publish": noise(0.6, 0.05)}
        if step % 5 == 4:
            spans["checkpoint"] = 0.8
        yield from self.rollout(sum(spans.values()), 0.3 + 0.03 * step, step)
        yield from self.speculation.train(step)
        for rank in range(RANKS):
            proc = f"trainer.{rank}"
            yield self.record(proc, "time/wait_batch", wait_s + 0.01 * rank, step)
            for stage, seconds in spans.items():
                yield self.record(proc, f"time/{stage}", seconds * (1 + 0.02 * rank), step)
            for name, value in {"train/row_tokens": 75_000, "train/tree_tokens": 6_800, "train/load": 2.1e11}.items():
                yield self.record(proc, name, value, step)
            yield self.record(proc, "time/step", self.t - began, step)
        loss = {
            "train/loss": -0.02 + noise(0, 0.006),
            "train/grad_norm": 0.8 + noise(0, 0.1),
            "train/lr": 1.5e-4,
            "train/entropy": 0.9 - 0.02 * step,
            "train/clip_ratio": 0.03,
            "train/approx_kl": 0.004,
            "train/logprob_mismatch_max": 2e-5 * math.exp(noise(0, 0.5)),
            "train/logprob_mismatch_mean": 2e-7 * math.exp(noise(0, 0.3)),
            "train/logprob_mismatch_tokens": 2100,
        }
        for name, value in loss.items():
            yield self.record("trainer.0", name, value, step)


class Speculation:
    """What server 0 counts since its start, and the training of its drafter."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.drafts = self.accepted = 0
        self.steps = dict.fromkeys(ARMS, 0)
        self.seconds = dict.fromkeys(ARMS, 0.0)
        self.tokens = dict.fromkeys(ARMS, 0.0)

    def report(self, seconds: float, tokens: float) -> Iterator[MetricRecord]:
        say, dice = self.story.record, self.story.random
        for arm, share in ARMS.items():
            self.steps[arm] += round(40 * share)
            self.seconds[arm] += seconds * share
            self.tokens[arm] += tokens * share
        self.drafts += 20
        self.accepted += 20 + dice.randint(0, 20)
        yield say("server.0", "tlt/accept_length", 1 + self.accepted / self.drafts)
        yield say("server.0", "tlt/draft_steps", self.drafts)
        yield say("server.0", "tlt/drafted_tokens", 3 * self.drafts)
        yield say("server.0", "tlt/accepted_tokens", self.accepted)
        yield say("server.0", "tlt/loss_to_plain", -0.25)
        for arm in ARMS:
            yield say("server.0", "tlt/steps", self.steps[arm], arm=arm)
            yield say("server.0", "tlt/seconds", self.seconds[arm], arm=arm)
            yield say("server.0", "tlt/tokens", self.tokens[arm], arm=arm)

    def train(self, step: int) -> Iterator[MetricRecord]:
        """Once per step of the run, while the server waits for the new weights."""
        say = self.story.record
        for state in ("busy", "idle", "training"):
            yield say(
                "coordinator", "drafter/servers", float(state == ("training" if step % 2 else "busy")), state=state
            )
        yield say("drafter.0", "drafter/buffer_samples", 30 * step)
        yield say("drafter.0", "drafter/buffer_bytes", 2_000_000 * step)
        if step % 2:
            top3 = 0.8 - 0.4 / (1 + step)
            yield say("drafter.0", "drafter/loss", 3.0 / (1 + step), 10 * step)
            yield say("drafter.0", "drafter/top3", top3, 10 * step)
            yield say("drafter.0", "drafter/held_out_top3", top3 - 0.02, 10 * step)
            yield say("drafter.0", "drafter/held_out_top3_served", top3 - 0.05, 10 * step)
            labels, t = {"version": f"d{10 * step}"}, self.story.t
            yield MetricRecord(t, "drafter.0", "event", "drafter/published", None, None, labels, "server.0")
            yield MetricRecord(t, "drafter.0", "event", "drafter/resting", None, None, {}, "work arrived")


def write_synthetic_run(
    run_dir: Path, seed: int = 0, steps: int = STEPS, status: str = "finished"
) -> list[MetricRecord]:
    """Fill ``run_dir`` with config, plan, state, metrics and the batcher's counters; returns the records."""
    run_dir.mkdir(parents=True, exist_ok=True)
    records = list(Story(seed, steps).records())
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r.to_wire()) + "\n" for r in records))
    (run_dir / "config.yaml").write_text(CONFIG.format(steps=steps))
    state = {
        "status": status, "pid": 1, "epoch": 0, "step": steps, "total_steps": steps, "started_at": START_T - 9.0,
        "updated_at": records[-1].t + 1.0, "cause": None,
    }  # fmt: skip
    (run_dir / "state.json").write_text(json.dumps(state))
    (run_dir / "launch.json").write_text(json.dumps({"dp": RANKS, "tp": 1, "pp": 1}))
    counters = {
        "acknowledged": 72 * steps, "trained": 72 * steps, "lost": 0, "duplicated": 0, "max_staleness": 2,
        "mixed_version_share": 0.095, "rejected": {"raised": 3, "timeout": 2}, "dropped": {},
    }  # fmt: skip
    (run_dir / "batcher_status.json").write_text(json.dumps(counters))
    return records
