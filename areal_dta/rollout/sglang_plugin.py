"""Plugin that runs inside SGLang (from 0.5.21, in its own environment): the tuner as a registered algorithm.

`register` is found as an entry point of the folder that `sglang_tlt` puts on ``PYTHONPATH``. It adds the algorithms
``AREAL_DTA_EAGLE`` and ``AREAL_DTA_EAGLE3``: SGLang's EAGLE worker, whose number of drafting steps `TunerPolicy` sets
before every decode step, with zero steps as plain decoding. SGLang builds one set of graphs for each number of steps;
topk, trees and the tokens verified cannot change at run time. The plugin also separates weight updates from disk: a
folder with ``drafter.json`` goes to the drafter only, any other to the policy only. What it builds on is looked up when
the worker is made, in SGLang's scheduler; if that is not there, the server ends instead of serving without.

Needs the standard library and our tuner only. It was written from the sources of 0.5.21 to 0.5.23 and has not run in a
real SGLang.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_dta.drafter.arms import OFF, Arm
from areal_dta.drafter.step_model import StepCosts
from areal_dta.drafter.tuner import Tuner, TunerSettings

__all__ = ["TunerPolicy", "register"]

log = logging.getLogger(__name__)

SETTINGS_VARIABLE = "AREAL_DTA_SGLANG_TLT"
DRAFTER_FILE = "drafter.json"
# Seconds by rows of a step: a guess at a GPU's shape (flat, then in proportion), which measured steps correct.
PRIOR_COSTS = {1: 0.02, 64: 0.02, 256: 0.03, 1024: 0.08}
LOG_STEPS = 2000
_OWN_METHODS = {"create_worker", "handle_server_args", "resolve_max_speculative_num_draft_tokens"}
_TREE_BACKENDS = ("flashinfer", "fa3", "triton")  # of SGLang; only these draft trees over pages of several tokens

_live: list[TunerPolicy] = []  # of this process, told about new weights


class TunerPolicy:
    """The tuner behind SGLang's interface of adaptive policies; an arm is a number of drafting steps.

    SGLang asks for the steps of a batch when it launches it and reports accepted drafts when it reads the result, with
    overlap after the launch of the next one. So launches wait in a queue for their results, and the time of a step is
    the time between two results. What a prefill or an idle moment made longer is not recorded.
    """

    def __init__(self, settings: Mapping[str, Any], clock: Callable[[], float] = time.perf_counter) -> None:
        arms = [Arm.parse(name) for name in settings["arms"]]
        if not arms or any((arm.drafter, arm.top_k, arm.num_verify) != ("eagle", 1, arm.depth) for arm in arms):
            raise ValueError(f"{SETTINGS_VARIABLE}: arms {settings['arms']} are not all chains such as eagle-d3-k1-v3")
        self._arms = {arm.depth: arm for arm in arms} | {0: OFF}
        self._max_batch: int | None = settings["max_batch"]
        tuner = TunerSettings(
            max_regret=settings["max_regret"], max_batch=self._max_batch, seed=settings["seed"] % 2**32
        )
        self.tuner = Tuner(StepCosts(PRIOR_COSTS), arms, tuner)
        self._clock = clock
        self._graph_sizes: list[int] | None = None
        self._launched: deque[tuple[Arm, int, int, bool]] = (
            deque()
        )  # arm, batch, context tokens, whether its time counts
        self._result_s: float | None = None
        self._prefilled = True
        self._context_tokens = 0
        self._num_records = 0

    def before(self, batch: Any) -> None:
        """Called with every batch that SGLang launches, before `get_steps_for_batch` where that is a decode step."""
        if batch.forward_mode.is_extend() or getattr(batch, "is_extend_in_batch", False):
            self._prefilled = True
            return
        total, size = getattr(batch, "seq_lens_sum", None), len(batch.seq_lens)
        if total is not None and size:
            self._context_tokens = int(total) // size

    # What SGLang's controller asks for.

    @property
    def candidate_steps(self) -> list[int]:
        return sorted(self._arms)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        self._graph_sizes = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Batch sizes whose graphs are captured for ``step``: those that it can be chosen for, padding included."""
        sizes = self._graph_sizes
        if sizes is None or step == 0 or self._max_batch is None:
            return sizes
        return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < self._max_batch]

    def get_steps_for_batch(self, batch_size: int) -> int:
        if batch_size < 1:
            return 0
        arm = self.tuner.choose(batch_size, self._context_tokens)
        self._launched.append((arm, batch_size, self._context_tokens, not self._prefilled))
        self._prefilled = False
        return arm.depth

    def on_verify_complete(self, num_correct_drafts_per_req: Sequence[int], batch_size: int) -> None:
        """A result was read; never asks for a switch, since the next launch does."""
        now_s, before_s = self._clock(), self._result_s
        self._result_s = now_s
        if not self._launched or batch_size < 1:
            return
        arm, size, context_tokens, counts = self._launched.popleft()
        if size != batch_size:  # a result that was never launched here, or the other way round
            self._launched.clear()
            self._prefilled = True
            return
        if before_s is None or not counts:
            return
        accepted = list(num_correct_drafts_per_req)
        depths = [sum(n > depth for n in accepted) for depth in range(arm.depth)]
        self.tuner.record(
            arm, size, context_tokens, sum(accepted) + size, max(now_s - before_s, 1e-6), depths if arm.depth else None
        )
        self._num_records += 1
        if self._num_records % LOG_STEPS == 0:
            shown = self.tuner.snapshot()
            keys = ("steps", "time_share", "accept_length")
            log.info("steps %d, time by arm %s, accept length %s", *(shown[key] for key in keys))

    def new_weights(self, role: str) -> None:
        """The policy or the drafter has new weights: what is known about acceptance ages."""
        self.tuner.new_version("eagle" if role == "draft" else None)
        self._prefilled = True


def register() -> None:
    """Entry point, called in every process of SGLang."""
    text = os.environ.get(SETTINGS_VARIABLE)
    if text is None:
        return
    settings = json.loads(text)
    algorithms = _import("speculative.spec_info").SpeculativeAlgorithm
    base = _import("speculative.spec_registry").CustomSpecAlgo
    for builtin in (algorithms.EAGLE, algorithms.EAGLE3):
        add = algorithms.register(
            f"AREAL_DTA_{builtin.name}", supports_overlap=True, spec_class=_spec_class(base, builtin)
        )
        add(lambda server_args: _worker_class(settings))


def _import(name: str) -> Any:
    return importlib.import_module(f"sglang.srt.{name}")


def _spec_class(base: type, builtin: Any) -> type:
    """A registered algorithm that answers every question as ``builtin`` does and makes our worker."""

    def forward(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(builtin, name)(*args, **kwargs)

    members = vars(type(builtin)).items()
    names = [n for n, value in members if inspect.isfunction(value) and not n.startswith("_") and n not in _OWN_METHODS]
    body: dict[str, Any] = {name: forward(name) for name in names}
    return type(f"Tuned{builtin.name}", (base,), body | {"handle_server_args": _check_server_args})


def _check_server_args(self: Any, server_args: Any) -> None:
    """What SGLang checks and sets for its own EAGLE; also refuses its adaptive mode beside ours."""
    if server_args.speculative_adaptive:
        raise ValueError("--speculative-adaptive and the tuner would both set the steps; remove the flag")
    if server_args.speculative_eagle_topk == 1:
        server_args.speculative_num_draft_tokens = server_args.speculative_num_steps + 1
        return
    backend = server_args.attention_backend
    if backend == "trtllm_mha" or ((server_args.page_size or 1) > 1 and backend not in _TREE_BACKENDS):
        raise ValueError(
            f"--speculative-eagle-topk {server_args.speculative_eagle_topk} with page size {server_args.page_size} and "
            f"attention backend {backend!r}; use {', '.join(_TREE_BACKENDS)}, or chains (eagle-dN-k1-vN) in tlt.arms"
        )


def _worker_class(settings: Mapping[str, Any]) -> type:
    """SGLang's EAGLE worker, with the tuner where there is something to choose from."""
    worker = _import("speculative.eagle_worker_v2").EAGLEWorkerV2
    _separate_disk_updates(_import("managers.scheduler_components.weight_updater").SchedulerWeightUpdaterManager)
    if not settings["arms"]:
        return worker
    controller = _import("speculative.adaptive_runtime_state").AdaptiveController
    for name in ("activate_step_by_batch", "build_adaptive_runtime_state", "on_verify_complete_cpu"):
        if not hasattr(worker, name):
            raise RuntimeError(f"this SGLang's EAGLE worker has no {name}; set one strategy in tlt.arms")

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        worker.__init__(self, *args, **kwargs)
        self.tuner_policy = TunerPolicy(settings)
        self.adaptive_controller = controller(self, self.tuner_policy)
        _live.append(self.tuner_policy)

    def forward_batch_generation(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.tuner_policy.before(batch)
        return worker.forward_batch_generation(self, batch, *args, **kwargs)

    methods = {"__init__": start, "forward_batch_generation": forward_batch_generation}
    return type("TunedEagleWorker", (worker,), methods)


def _separate_disk_updates(manager: Any) -> None:
    """Make updates from disk reach either the policy or the drafter; AttributeError where SGLang has it otherwise."""
    update, select = manager.update_weights_from_disk, manager._select_runners
    if hasattr(update, "separates"):
        return
    role: list[str] = []  # of the update under way; the scheduler handles one request at a time

    def update_weights_from_disk(self: Any, recv_req: Any) -> Any:
        role.append("draft" if (Path(recv_req.model_path) / DRAFTER_FILE).is_file() else "target")
        try:
            answer = update(self, recv_req)
            if answer.success:
                for policy in _live:
                    policy.new_weights(role[0])
            return answer
        finally:
            role.clear()

    def select_runners(self: Any, selector: str = "all") -> Any:
        return select(self, role[0] if role and selector == "all" else selector)

    update_weights_from_disk.separates = True  # type: ignore[attr-defined]
    manager.update_weights_from_disk, manager._select_runners = update_weights_from_disk, select_runners
