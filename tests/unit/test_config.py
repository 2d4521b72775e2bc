"""Loading a configuration: what is accepted, derived, refused, and what the errors say. AReaL is not imported here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_dta.config import Config, ConfigError, load_config, load_run_config, make_config, parse_allocation

REPO = Path(__file__).resolve().parents[2]
QUICKSTART = REPO / "experiments" / "quickstart" / "quickstart.yaml"
SHIPPED = sorted((REPO / "experiments").glob("*/*.yaml"))
FIXTURES = Path(__file__).parent / "fixtures"


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_config_resolves_without_notices(path: Path) -> None:
    assert load_config(path).notices == ()


@pytest.mark.parametrize("path", [*SHIPPED, *sorted(FIXTURES.glob("*.yaml"))], ids=lambda p: p.stem)
def test_written_config_reads_back_equal(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_run_config(tmp_path) == config


def test_overrides_replace_values_and_keep_types() -> None:
    config = load_config(QUICKSTART, ["actor.optimizer.lr=1e-5", "+sglang.attention_backend=triton", "trial_name=7"])
    assert config.actor.optimizer is not None
    assert config.actor.optimizer.lr == 1e-5
    assert config.sglang.attention_backend == "triton"
    assert config.trial_name == "7"


def test_empty_override_is_empty_text() -> None:
    assert load_config(QUICKSTART, ["actor.path="]).actor.path == ""


def test_areal_defaults_hold_where_the_file_is_silent() -> None:
    config = load_config(QUICKSTART)
    assert config.actor.reward_clip == 20.0
    assert config.actor.gae_lambda == 1.0
    assert config.gconfig.top_k == 100_000_000


def test_keys_unused_here_pass_through_untouched() -> None:
    config = load_config(QUICKSTART, ["actor.sapo_tau_pos=2.5", "stats_logger.wandb.project=p"])
    assert config.raw["actor"]["sapo_tau_pos"] == 2.5
    assert config.areal_mapping()["stats_logger"]["wandb"] == {"project": "p"}


def test_group_size_batch_and_temperature_follow_their_source() -> None:
    config = load_config(QUICKSTART, ["gconfig.n_samples=5", "train_dataset.batch_size=4", "gconfig.temperature=0.7"])
    assert config.actor.reward_norm is not None
    assert config.actor.reward_norm.group_size == 5
    assert config.rollout.consumer_batch_size == 4
    assert config.actor.temperature == 0.7
    assert config.episodes_per_step == 20


def test_evaluation_is_greedy_and_single_unless_configured() -> None:
    config = load_config(QUICKSTART)
    assert config.eval_gconfig is not None
    assert (config.eval_gconfig.greedy, config.eval_gconfig.n_samples) == (True, 1)
    assert load_config(QUICKSTART, ["eval_gconfig.n_samples=3"]).eval_gconfig.n_samples == 3  # type: ignore[union-attr]


def test_synchronous_training_has_no_staleness() -> None:
    config = load_config(QUICKSTART, ["async_training=false"])
    assert config.rollout.max_head_offpolicyness == 0
    assert "max_head_offpolicyness" in config.notices[0]


def test_total_steps_count_whole_batches_and_respect_the_limit() -> None:
    config = load_config(QUICKSTART, ["total_train_epochs=2", "total_train_steps=null", "train_dataset.batch_size=4"])
    assert config.total_steps(num_items=9) == 4
    assert load_config(QUICKSTART).total_steps(num_items=9) == 30


def test_changed_copy_is_checked() -> None:
    config = load_config(QUICKSTART)
    assert config.with_values(trial_name="a").trial_name == "a"
    with pytest.raises(ConfigError, match="trial_name"):
        config.with_values(trial_name="a/b")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor.optimizr.lr=1", ["actor.optimizr", "did you mean actor.optimizer"]),
        ("lr=1", ["unknown key lr=1", "did you mean actor.optimizer.lr"]),
        ("gconfig.n_sample=2", ["gconfig.n_sample=2", "did you mean gconfig.n_samples"]),
        ("train_dataset.batch_size=-4", ["train_dataset.batch_size=-4", "positive"]),
        ("gconfig.n_samples=0", ["gconfig.n_samples=0", "positive"]),
        ("gconfig.n_samples=2.5", ["gconfig.n_samples=2.5", "whole number"]),
        ("seed=x", ["seed='x'", "whole number"]),
        ("seed=true", ["seed=True", "whole number"]),
        ("async_training=3", ["async_training=3", "true or false"]),
        ("gconfig=3", ["gconfig=3", "section"]),
        ("embedded.ports=7000", ["embedded.ports=7000", "list"]),
        ("embedded.ports=[7000,7001]", ["one port for each of 1 servers"]),
        ("embedded.ports=[70000]", ["70000", "65535"]),
        ("tree_training_mode=dtaa", ["tree_training_mode=dtaa", "disabled, sparse, dta", "did you mean dta"]),
        ("dta.plan=clasic", ["dta.plan=clasic", "auto, classic, sparse, dense", "did you mean classic"]),
        ("dta.order=heavy", ["dta.order=heavy", "lexicographic, heavy_first, heavy_last"]),
        ("dta.activation_budget=2Gigs", ["dta.activation_budget='2Gigs'", "2GiB"]),
        ("dta.activation_budget=-1", ["dta.activation_budget=-1", "not negative"]),
        ("dta.max_block_tokens=0", ["dta.max_block_tokens=0", "positive"]),
        ("dta.calibrate=1", ["dta.calibrate=1", "true or false"]),
        (
            "dta.fused_loss=true actor.importance_sampling_level=sequence",
            ["dta.fused_loss=true", "actor.importance_sampling_level=sequence", "set dta.fused_loss=false"],
        ),
        (
            "dta.fused_loss=true actor.rejection_sampling.level=sequence",
            ["dta.fused_loss=true", "actor.rejection_sampling.level=sequence", "rejection_sampling.level=token"],
        ),
        ("dta.leaf_merge=false", ["dta.leaf_merge=false", "dta.plan=auto", "set dta.plan=dense"]),
        ("dta.cut_tail=false dta.plan=sparse", ["dta.cut_tail=false", "dta.plan=sparse", "set dta.plan=classic"]),
        ("actor.optimizer.type=sgd", ["actor.optimizer.type=sgd", "choose one of: adam, adamw"]),
        ("actor.optimizer.type=adam_bf16", ["actor.optimizer.type=adam_bf16", "adam, adamw"]),
        ("actor.log_agent_stats=true", ["actor.log_agent_stats=True", "set it to false"]),
        ("actor.init_from_scratch=true", ["actor.init_from_scratch=True", "actor.path"]),
        ("actor.megatron.fp8_config.mode=e4m3", ["actor.megatron.fp8_config", "not supported"]),
        ("rollout.agent.mode=subproc", ["rollout.agent.mode=subproc", "rollout.agent.mode=inline"]),
        ("rollout.agent.agent_cls_path=a.B", ["rollout.agent.agent_cls_path=a.B", "workflow"]),
        ("evaluator.freq_secs=60", ["evaluator.freq_secs=60", "evaluator.freq_steps"]),
        ("recover.no_load_optim=true", ["recover.no_load_optim=True", "remove it"]),
        ("recover.mode=fault", ["recover.mode=fault", "disabled, off, auto, on"]),
        (
            "econfig.domain=airlines",
            ["econfig.domain=airlines", "mock, airline, retail, telecom", "did you mean airline"],
        ),
        ("econfig.solo_mode=true", ["econfig.solo_mode=true", "econfig.solo_mode=false"]),
        ("econfig.add_thinking_tool=true", ["econfig.add_thinking_tool=true", "econfig.add_thinking_tool=false"]),
        ("econfig.turn_discount=1.5", ["econfig.turn_discount=1.5", "at most 1"]),
        ("batcher.port=70000", ["batcher.port=70000", "65535"]),
        ("runtime.router_port=-1", ["runtime.router_port=-1", "65535"]),
        ("batcher.port=7000 runtime.router_port=7000", ["runtime.router_port=7000", "batcher.port"]),
        ("actor.backend=megatron:d2c2", ["actor.backend", "context parallelism"]),
        ("actor.backend=megatron:d2e2", ["actor.backend", "expert parallelism"]),
        ("actor.backend=megatron:d2x2", ["actor.backend", "'x'"]),
        ("actor.backend=vllm:d2", ["actor.backend=vllm:d2", "megatron:d2"]),
        ("gconfig.frequency_penalty=0.5", ["gconfig.frequency_penalty=0.5", "log-probs"]),
        ("actor.m2_threshold=0.1", ["actor.m2_threshold", "partition"]),
        ("batcher.group_timeout_s=5", ["batcher.group_timeout_s=5", "rollout.request_timeout=120"]),
        ("actor.backend=megatron:d1000", ["1000 data-parallel ranks", "train_dataset.batch_size"]),
        ("rollout.backend=embedded:d1t2", ["rollout.backend=embedded:d1t2", "embedded:d1"]),
        ("rollout.backend=vllm:d1", ["rollout.backend=vllm:d1", "sglang"]),
        ("rollout.backend=sglang:d8", ["10 devices", "cluster.n_gpus_per_node"]),
        ("rollout.consumer_batch_size=3", ["rollout.consumer_batch_size=3", "train_dataset.batch_size=9"]),
        ("actor.temperature=1.0", ["actor.temperature=1.0", "gconfig.temperature=0.8"]),
        ("actor.ppo_n_minibatches=10", ["actor.ppo_n_minibatches=10", "train_dataset.batch_size=9"]),
        ("critic.path=x", ["critic", "not supported"]),
        ("actor.use_lora=true", ["actor.use_lora=True", "not supported"]),
        ("actor.adv_norm.mean_level=group", ["actor.adv_norm.mean_level", "reward_norm"]),
        ("workflow=justaname", ["workflow='justaname'", "dotted"]),
        ("experiment_name=a/b", ["experiment_name='a/b'", "folder"]),
        ("enable_tree_training=false tree_training_mode=dta", ["enable_tree_training=false", "tree_training_mode=dta"]),
        ("nonsense", ["'nonsense'", "key=value"]),
        ("seed=${nowhere.at.all}", ["nowhere"]),
    ],
)
def test_nonsense_is_refused_naming_key_value_and_remedy(override: str, parts: list[str]) -> None:
    message = error_of(*override.split())
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("2GiB", 2 << 30), ("1.5 GB", 1_500_000_000), ("512M", 512_000_000), ("4096", 4096), ("3KiB", 3072)],
)
def test_a_number_of_bytes_may_carry_a_unit(text: str, num_bytes: int) -> None:
    config = load_config(QUICKSTART, [f"dta.activation_budget={text}"])
    assert config.dta.activation_budget == config.raw["dta"]["activation_budget"] == num_bytes


def test_plan_keys_without_effect_are_announced() -> None:
    config = load_config(QUICKSTART, ["tree_training_mode=sparse", "dta.plan=classic", "dta.calibrate=true"])
    assert config.notices == (
        "dta.plan=classic has no effect with tree_training_mode=sparse",
        "dta.calibrate=True has no effect with tree_training_mode=sparse",
    )


def test_missing_mandatory_key_is_named() -> None:
    with pytest.raises(ConfigError, match="actor.backend is missing"):
        make_config({"experiment_name": "a", "workflow": "a.B"} | {"rollout": {"backend": "embedded:d1"}})


def test_missing_file_and_broken_yaml_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1, 2")
    with pytest.raises(ConfigError, match="broken.yaml"):
        load_config(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(tmp_path / "list.yaml")


def test_given_mapping_is_not_changed() -> None:
    given = load_config(FIXTURES / "areal_tau2.yaml").raw
    before = Config.to_yaml(make_config(given))
    make_config({**given, "async_training": False})
    assert make_config(given).to_yaml() == before


class TestArealTau2Files:
    """Files with the keys of AReaL's own tau2 examples load, and say what they were read as."""

    def test_older_spelling_loads(self) -> None:
        config = load_config(FIXTURES / "areal_tau2.yaml")
        assert (config.rollout.backend, config.actor.backend) == ("sglang:d6", "megatron:d2")
        assert config.actor.rejection_sampling is not None
        assert config.actor.rejection_sampling.upper == 4.0
        assert config.raw["rollout"]["agent"]["turn_discount"] == 0.95
        assert config.raw["allocation_mode"] == ""
        assert config.tree_training_mode == "dta"
        assert config.workflow == "experiments.tau2.workflow.Tau2Workflow"
        assert any("sglang:d6" in notice for notice in config.notices)

    def test_tree_branch_spelling_loads_and_maps_its_backend(self) -> None:
        config = load_config(FIXTURES / "areal_tau2_dta.yaml")
        assert config.actor.backend == "megatron:d4"
        assert (config.tree_training_mode, config.packing_algorithm) == ("dta", "dta")
        assert any("archon:d4" in notice and "megatron:d4" in notice for notice in config.notices)

    @pytest.mark.parametrize("name", ["areal_tau2", "areal_tau2_dta"])
    def test_the_user_model_is_replaced_by_the_scripted_user_and_that_is_said(self, name: str) -> None:
        config = load_config(FIXTURES / f"{name}.yaml")
        econfig = config.econfig
        assert (econfig.user_llm, econfig.user_llm_base_url, econfig.user_llm_args) == (None, None, None)
        assert (econfig.domain, econfig.invalid_format_penalty) == ("retail", 0.2)
        [notice] = [n for n in config.notices if "user_llm" in n]
        assert "openai/some-user-model" in notice
        assert "scripted" in notice

    @pytest.mark.parametrize("name", ["areal_tau2", "areal_tau2_dta"])
    def test_what_is_not_done_here_is_said(self, name: str) -> None:
        notices = load_config(FIXTURES / f"{name}.yaml").notices
        for part in (
            "stats_logger.wandb.mode=online",
            "saver.freq_epochs=1",
            "recover.mode=disabled: recover.freq_epochs=1, recover.freq_secs=1800",
            "rollout.enable_rollout_tracing=true",
            "scheduling_spec",
        ):
            assert sum(part in notice for notice in notices) == 1, part

    def test_fsdp_maps_to_megatron(self) -> None:
        config = load_config(QUICKSTART, ["actor.backend=fsdp:d2"])
        assert config.actor.backend == "megatron:d2"
        assert "fsdp:d2" in config.notices[0]


class TestKeysWithoutEffect:
    """An AReaL key that does nothing here, or something else, is never ignored silently."""

    @pytest.mark.parametrize(
        "override",
        [
            "saver.mode=async",
            "saver.freq_secs=60",
            "recover.retries=5",
            "stats_logger.swanlab.mode=cloud",
            "stats_logger.tensorboard.path=logs",
            "stats_logger.trackio.mode=online",
            "perf_tracer.enabled=true",
            "memory_profiler.max_entries=5",
            "enable_offload=true",
            "actor.grad_reduce_dtype=bfloat16",
            "actor.optimizer_dtype=bfloat16",
            "actor.megatron.ddp.overlap_grad_reduce=true",
            "actor.megatron.use_deterministic_algorithms=true",
            "rollout.queue_size=8",
            "rollout.pause_grace_period=2",
            "rollout.setup_timeout=60",
            "scheduler.type=slurm",
            "train_dataset.drop_last=false",
        ],
    )
    def test_a_value_other_than_what_is_done_gives_one_notice(self, override: str) -> None:
        [notice] = load_config(QUICKSTART, [override]).notices
        assert override.replace("period=2", "period=2.0").replace("timeout=60", "timeout=60.0") in notice or (
            notice.startswith("memory_profiler")
        )

    @pytest.mark.parametrize(
        "override",
        [
            "saver.mode=sync",
            "perf_tracer.session_tracer.enabled=true",
            "actor.megatron.ddp.grad_reduce_in_fp32=true",
            "rollout.queue_size=null",
            "scheduler.type=local",
        ],
    )
    def test_a_value_that_says_what_is_done_gives_none(self, override: str) -> None:
        assert load_config(QUICKSTART, [override]).notices == ()

    def test_other_workflows_keep_their_environment_keys(self) -> None:
        given = ["workflow=a.B", "prepare=null", "econfig.user_llm=m", "econfig.domain=bank", "econfig.solo_mode=true"]
        config = load_config(QUICKSTART, given)
        assert (config.econfig.user_llm, config.econfig.domain) == ("m", "bank")
        assert config.notices == ()


class TestSchedules:
    """Quickstart: 9 prompts a step, so 90 prompts are 10 steps an epoch."""

    def test_the_shorter_interval_of_saver_and_recover_counts(self) -> None:
        both = load_config(QUICKSTART, ["saver.freq_epochs=1", "saver.freq_secs=9", "recover.freq_steps=12"])
        assert both.checkpoint_intervals(num_items=90) == (10, 9)
        assert load_config(QUICKSTART).checkpoint_intervals(num_items=90) == (5, None)

    @pytest.mark.parametrize("mode", ["disabled", "'off'"])
    def test_disabled_recovery_leaves_the_savers_checkpoints(self, mode: str) -> None:
        config = load_config(QUICKSTART, [f"recover.mode={mode}", "recover.freq_secs=7"])
        assert config.checkpoint_intervals(num_items=90) == (None, None)
        config = load_config(QUICKSTART, [f"recover.mode={mode}", "saver.freq_steps=8"])
        assert config.checkpoint_intervals(num_items=90) == (8, None)
        assert any("recover.freq_steps=5 without effect" in notice for notice in config.notices)

    def test_evaluations_count_steps_and_epochs(self) -> None:
        config = load_config(QUICKSTART, ["evaluator.freq_epochs=1", "evaluator.freq_steps=4"])
        assert [step for step in range(20) if config.evaluation_due(step, num_items=90)] == [3, 7, 9, 11, 15, 19]
        assert not any(load_config(QUICKSTART).evaluation_due(step, num_items=90) for step in range(20))


class TestPorts:
    """Fixed ports are checked whatever the rollout backend is."""

    SGLANG = ("rollout.backend=sglang:d2", "actor.backend=megatron:d2")

    @pytest.mark.parametrize("backend", [(), SGLANG], ids=["embedded", "sglang"])
    def test_impossible_and_shared_ports_are_refused(self, backend: tuple[str, ...]) -> None:
        assert "runtime.router_port=65536" in error_of(*backend, "runtime.router_port=65536")
        assert "also used by batcher.port" in error_of(*backend, "batcher.port=7000", "runtime.router_port=7000")

    def test_ports_of_embedded_servers_make_no_sense_for_sglang(self) -> None:
        message = error_of(*self.SGLANG, "embedded.ports=[7000,7001]")
        assert "embedded.ports=[7000, 7001]" in message
        assert "remove it" in message
        assert "sglang" in error_of(*self.SGLANG, "embedded.max_waiting=500")

    def test_limits_that_would_refuse_the_runs_own_requests_are_refused(self) -> None:
        message = error_of("rollout.max_concurrent_rollouts=64", "embedded.max_waiting=63")
        assert "embedded.max_waiting=63" in message and "rollout.max_concurrent_rollouts=64" in message
        assert "embedded:d2" in error_of("embedded.while_released=refuse")


class TestAllocation:
    def test_letters_in_any_order_and_absent_ones_are_one(self) -> None:
        alloc = parse_allocation("megatron:p2d3t4", "actor.backend")
        assert (alloc.dp, alloc.tp, alloc.pp, alloc.world_size) == (3, 4, 2, 24)
        assert str(alloc) == "megatron:d3t4p2"

    def test_training_takes_data_tensor_and_pipeline_sizes(self) -> None:
        assert load_config(QUICKSTART, ["actor.backend=megatron:d2t2p2"]).train_allocation.world_size == 8
        assert str(load_config(QUICKSTART, ["actor.backend=archon:p2"]).train_allocation) == "megatron:d1p2"

    def test_virtual_pipeline_stages_are_refused(self) -> None:
        message = error_of("actor.backend=megatron:p2", "+actor.megatron.virtual_pipeline_parallel_size=2")
        assert "actor.megatron.virtual_pipeline_parallel_size=2" in message

    def test_named_and_dotted_parts(self) -> None:
        assert str(parse_allocation("sglang[rollout]:d4", "k")) == "sglang:d4"
        assert str(parse_allocation("sglang.d4t2", "k")) == "sglang:d4t2"

    @pytest.mark.parametrize(
        "spec", ["", "megatron", "megatron:", "megatron:d", "megatron:d0", "megatron:d2d2", "m:d-1"]
    )
    def test_malformed_is_refused_with_its_key(self, spec: str) -> None:
        with pytest.raises(ConfigError, match=r"actor\.backend"):
            parse_allocation(spec, "actor.backend")

    def test_colocation_is_refused(self) -> None:
        assert "colocates" in error_of("allocation_mode=sglang:d1|fsdp:d1")


def test_importing_and_loading_needs_neither_torch_nor_areal() -> None:
    code = (
        "import sys; from areal_dta.config import load_config; load_config(sys.argv[1]);"
        "bad = {'torch', 'areal', 'transformers'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(QUICKSTART)], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
