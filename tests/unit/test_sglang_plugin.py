"""The tuner as SGLang's policy, and the plugin in a package of the same names that stands in for SGLang's.

What the stand-in has was read from the sources of 0.5.21 to 0.5.23. Not covered: a real SGLang.
"""

from __future__ import annotations

import enum
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from areal_dta.rollout import sglang_plugin
from areal_dta.rollout.sglang_tlt import SETTINGS_VARIABLE


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def settings(*arms: str, max_batch: int | None = None) -> dict[str, Any]:
    return {"arms": list(arms), "max_regret": 0.02, "max_batch": max_batch, "seed": 0}


def decoding(size: int, tokens: int = 100) -> SimpleNamespace:
    mode = SimpleNamespace(is_extend=lambda: False)
    return SimpleNamespace(
        forward_mode=mode, is_extend_in_batch=False, seq_lens=[tokens] * size, seq_lens_sum=tokens * size
    )


PREFILL = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True), seq_lens=[100], seq_lens_sum=100)


class TestPolicy:
    def run(self, policy: sglang_plugin.TunerPolicy, clock: Clock, accept: float, num_steps: int = 3000) -> list[int]:
        """Overlapped steps of one sequence: 20 ms and 1 ms for each draft, of which ``accept`` are right."""
        chosen: list[int] = []
        owed = 0.0
        for _ in range(num_steps):
            policy.before(decoding(1))
            chosen.append(policy.get_steps_for_batch(1))
            if len(chosen) < 2:
                continue
            steps = chosen[-2]
            clock.now_s += 0.02 + 0.001 * steps
            owed += accept * steps
            right = min(int(owed), steps)
            owed -= right
            policy.on_verify_complete([right], 1)
        return chosen

    def test_it_drafts_where_drafts_are_right_and_stops_where_they_are_not(self) -> None:
        for accept, expected in ((0.8, 5), (0.0, 0)):
            clock = Clock()
            policy = sglang_plugin.TunerPolicy(settings("eagle-d1-k1-v1", "eagle-d5-k1-v5"), clock)
            assert policy.candidate_steps == [0, 1, 5]
            last = self.run(policy, clock, accept)[-500:]
            assert last.count(expected) > 400

    def test_a_large_batch_is_never_drafted_for_and_has_no_graphs(self) -> None:
        policy = sglang_plugin.TunerPolicy(settings("eagle-d3-k1-v3", max_batch=6), Clock())
        policy.set_cuda_graph_bs([16, 1, 2, 4, 8])
        assert policy.cuda_graph_bs_for_step(3) == [1, 2, 4, 8]  # 6 is padded to 8
        assert policy.cuda_graph_bs_for_step(0) == [1, 2, 4, 8, 16]
        policy.set_cuda_graph_bs(None)
        assert policy.cuda_graph_bs_for_step(3) is None
        assert [policy.get_steps_for_batch(16) for _ in range(50)] == [0] * 50
        assert policy.get_steps_for_batch(0) == 0

    def test_time_of_prefills_and_results_that_do_not_match_are_not_recorded(self) -> None:
        clock = Clock()
        policy = sglang_plugin.TunerPolicy(settings("eagle-d3-k1-v3"), clock)

        def step(size: int = 1, reported: int = 1) -> int:
            policy.before(decoding(size))
            policy.get_steps_for_batch(size)
            clock.now_s += 0.02
            policy.on_verify_complete([0] * reported, reported)
            return int(policy.tuner.snapshot()["steps"])

        assert [step(), step(), step()] == [0, 1, 2]
        policy.before(PREFILL)
        clock.now_s += 5
        assert [step(), step()] == [2, 3]
        assert [step(2, 1), step(), step()] == [3, 3, 4]
        policy.on_verify_complete([0], 1)  # of nothing
        assert policy.tuner.snapshot()["steps"] == 4

    def test_only_chains_can_be_chosen_from(self) -> None:
        with pytest.raises(ValueError, match="not all chains"):
            sglang_plugin.TunerPolicy(settings("eagle-d4-k2-v7"))


class Algorithms(enum.Enum):
    """Stands in for SGLang's algorithms."""

    EAGLE = 1
    EAGLE3 = 2
    NONE = 3

    def is_eagle(self) -> bool:
        return self is not Algorithms.NONE

    def is_eagle3(self) -> bool:
        return self is Algorithms.EAGLE3

    def create_future_map(self, device: str) -> tuple[str, str]:
        return self.name, device

    @classmethod
    def register(cls, name: str, *, supports_overlap: bool, spec_class: type) -> Any:
        assert supports_overlap  # SGLang takes no other worker by default

        def add(factory: Any) -> Any:
            REGISTERED[name] = spec_class(name, factory)
            return factory

        return add


REGISTERED: dict[str, Any] = {}


class Spec:
    def __init__(self, name: str, factory: Any) -> None:
        self.name, self.factory = name, factory

    def is_eagle(self) -> bool:
        return False

    def create_worker(self, server_args: Any) -> Any:
        return self.factory(server_args)


class Worker:
    adaptive_controller: Any = None
    speculative_num_steps = 3

    def __init__(self, name: str) -> None:
        self.name = name

    def forward_batch_generation(self, batch: Any, more: int) -> int:
        if not batch.forward_mode.is_extend():
            self.activate_step_by_batch(len(batch.seq_lens))
        return more

    def activate_step_by_batch(self, size: int) -> None:
        self.adaptive_controller.activate_step_by_batch(size)

    def build_adaptive_runtime_state(self) -> None: ...

    def on_verify_complete_cpu(self, accepted: list[int], size: int) -> None:
        self.adaptive_controller.params.on_verify_complete(accepted, size)


class Controller:
    def __init__(self, worker: Any, params: Any) -> None:
        self.worker, self.params = worker, params
        worker.build_adaptive_runtime_state()

    def activate_step_by_batch(self, size: int) -> None:
        self.worker.speculative_num_steps = self.params.get_steps_for_batch(size)


@dataclass(slots=True)
class Manager:
    loaded: list[tuple[str, str]]

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        if recv_req.model_path == "fails":
            raise RuntimeError("disk")
        self.loaded += [(role, Path(recv_req.model_path).name) for role in self._select_runners()]
        return SimpleNamespace(success=True)

    def _select_runners(self, selector: str = "all") -> list[str]:
        return ["target", "draft"] if selector == "all" else [selector]


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in in SGLang's place, with the tuner's settings in the environment."""
    stand_ins: dict[str, dict[str, Any]] = {
        "speculative.spec_info": {"SpeculativeAlgorithm": Algorithms},
        "speculative.spec_registry": {"CustomSpecAlgo": Spec},
        "speculative.eagle_worker_v2": {"EAGLEWorkerV2": Worker},
        "speculative.adaptive_runtime_state": {"AdaptiveController": Controller},
        "managers.scheduler_components.weight_updater": {"SchedulerWeightUpdaterManager": Manager},
    }
    for name, attributes in stand_ins.items():
        parts = f"sglang.srt.{name}".split(".")
        for i in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:i]))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for attribute, value in attributes.items():
            setattr(module, attribute, value)
    for method in ("update_weights_from_disk", "_select_runners"):
        monkeypatch.setattr(Manager, method, getattr(Manager, method))
    monkeypatch.setattr(sglang_plugin, "_live", [])
    monkeypatch.setenv(SETTINGS_VARIABLE, json.dumps(settings("eagle-d1-k1-v1", "eagle-d3-k1-v3")))
    REGISTERED.clear()
    sglang_plugin.register()


@pytest.mark.usefixtures("plugged")
class TestPlugin:
    def test_the_algorithms_answer_as_the_built_in_ones(self) -> None:
        assert sorted(REGISTERED) == ["AREAL_DTA_EAGLE", "AREAL_DTA_EAGLE3"]
        ours = REGISTERED["AREAL_DTA_EAGLE3"]
        assert (ours.is_eagle(), ours.is_eagle3(), ours.create_future_map("cuda")) == (True, True, ("EAGLE3", "cuda"))
        assert REGISTERED["AREAL_DTA_EAGLE"].is_eagle3() is False

    def test_the_worker_asks_the_tuner_before_every_decode_step(self) -> None:
        worker = REGISTERED["AREAL_DTA_EAGLE"].create_worker(None)("w")
        assert (Worker in type(worker).__mro__, worker.name) == (True, "w")
        assert worker.forward_batch_generation(PREFILL, more=7) == 7
        assert worker.speculative_num_steps == 3
        assert worker.forward_batch_generation(decoding(2), more=8) == 8
        assert worker.speculative_num_steps == 0  # plainly first
        worker.on_verify_complete_cpu([0, 0], 2)
        worker.forward_batch_generation(decoding(2), 0)
        worker.on_verify_complete_cpu([0, 0], 2)
        assert worker.tuner_policy.tuner.snapshot()["steps"] == 1

    def test_updates_from_disk_reach_the_policy_or_the_drafter(self, tmp_path: Path) -> None:
        create = REGISTERED["AREAL_DTA_EAGLE"].create_worker
        worker = create(None)("w")
        create(None)  # a second time changes nothing
        (tmp_path / "drafter").mkdir()
        (tmp_path / "drafter" / "drafter.json").write_text("{}")
        manager = Manager([])
        aged: list[str | None] = []
        worker.tuner_policy.tuner.new_version = aged.append
        with pytest.raises(RuntimeError, match="disk"):
            manager.update_weights_from_disk(SimpleNamespace(model_path="fails"))
        for name in ("policy", "drafter"):
            manager.update_weights_from_disk(SimpleNamespace(model_path=str(tmp_path / name)))
        assert manager.loaded == [("target", "policy"), ("draft", "drafter")]
        assert aged == [None, "eagle"]
        assert manager._select_runners() == ["target", "draft"]  # of other updates
        assert manager._select_runners("draft") == ["draft"]

    def test_one_strategy_needs_no_tuner_but_keeps_weights_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SETTINGS_VARIABLE, json.dumps(settings()))
        sglang_plugin.register()
        assert REGISTERED["AREAL_DTA_EAGLE"].create_worker(None) is Worker
        manager = Manager([])
        manager.update_weights_from_disk(SimpleNamespace(model_path="policy"))
        assert manager.loaded == [("target", "policy")]

    def test_another_inside_ends_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.delattr(Worker, "on_verify_complete_cpu")
            with pytest.raises(RuntimeError, match="no on_verify_complete_cpu"):
                REGISTERED["AREAL_DTA_EAGLE"].create_worker(None)
        monkeypatch.delattr(Manager, "_select_runners")
        with pytest.raises(AttributeError, match="_select_runners"):
            REGISTERED["AREAL_DTA_EAGLE"].create_worker(None)

    @pytest.mark.parametrize(
        ("topk", "page_size", "backend", "adaptive", "message"),
        [
            (1, 64, "trtllm_mha", False, None),
            (4, 1, "fa3", False, None),
            (4, 64, "triton", False, None),
            (4, 64, "torch_native", False, "page size 64"),
            (4, 1, "trtllm_mha", False, "trtllm_mha"),
            (1, 1, "fa3", True, "speculative-adaptive"),
        ],
    )
    def test_server_arguments_are_checked_as_for_the_built_in_ones(
        self, topk: int, page_size: int, backend: str, adaptive: bool, message: str | None
    ) -> None:
        given = SimpleNamespace(
            speculative_eagle_topk=topk,
            speculative_num_steps=2,
            speculative_num_draft_tokens=9,
            page_size=page_size,
            attention_backend=backend,
            speculative_adaptive=adaptive,
        )
        if message is None:
            REGISTERED["AREAL_DTA_EAGLE"].handle_server_args(given)
            assert given.speculative_num_draft_tokens == (3 if topk == 1 else 9)  # a chain is verified as a whole
            return
        with pytest.raises(ValueError, match=message):
            REGISTERED["AREAL_DTA_EAGLE"].handle_server_args(given)
