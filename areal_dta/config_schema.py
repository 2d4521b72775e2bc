"""The keys the project itself uses, as frozen records. Names, nesting and meaning are AReaL's where AReaL has the key.

A class named like one of AReaL's extends that section of `areal_keys.json`: a field without a default takes the default
from the table, a field with one sets ours. AReaL keys not listed here are checked and passed through (`Config.raw`).
Only `areal_dta.config` builds these records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NewType

__all__ = [
    "BatcherConfig",
    "ClusterSpecConfig",
    "DtaConfig",
    "EmbeddedConfig",
    "EnvConfig",
    "EvaluatorConfig",
    "GenerationHyperparameters",
    "InferenceEngineConfig",
    "MicroBatchSpec",
    "NormConfig",
    "OptimizerConfig",
    "PPOActorConfig",
    "RecoverConfig",
    "RejectionSamplingConfig",
    "RuntimeConfig",
    "SGLangConfig",
    "SaverConfig",
    "TelemetryConfig",
    "TltConfig",
    "TrainDatasetConfig",
    "ValidDatasetConfig",
]

Bytes = NewType("Bytes", int)  # a file may also say 2GiB, 512 MB


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    mean_level: str | None
    mean_leave1out: bool
    std_level: str | None
    std_unbiased: bool
    eps: float
    group_size: int  # gconfig.n_samples where a level is `group`


@dataclass(frozen=True, kw_only=True)
class MicroBatchSpec:
    n_mbs: int | None
    max_tokens_per_mb: int | None
    granularity: int
    packing_algorithm: str


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    type: Literal["adam", "adamw"]  # both are Adam with decoupled weight decay
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    gradient_clipping: float
    lr_scheduler_type: str
    warmup_steps_proportion: float
    min_lr_ratio: float


@dataclass(frozen=True, kw_only=True)
class RejectionSamplingConfig:
    level: str
    action: str
    metric: str
    agg: str
    upper: float
    lower: float | None


@dataclass(frozen=True, kw_only=True)
class GenerationHyperparameters:
    n_samples: int  # episodes per prompt: the group
    max_new_tokens: int  # per turn
    min_new_tokens: int
    max_tokens: int  # prompt and completion together
    greedy: bool
    top_p: float
    top_k: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] | None
    ignore_eos: bool
    skip_special_tokens: bool
    frequency_penalty: float


@dataclass(frozen=True, kw_only=True)
class InferenceEngineConfig:
    backend: str  # embedded:dN | sglang:dNtM
    max_concurrent_rollouts: int | None
    queue_size: int | None
    consumer_batch_size: int  # prompts per step; train_dataset.batch_size
    max_head_offpolicyness: int
    request_timeout: float
    request_retries: int
    setup_timeout: float
    pause_grace_period: float
    check_trajectory_format: bool
    dump_to_file: bool


@dataclass(frozen=True, kw_only=True)
class PPOActorConfig:
    """One trained (or, as `ref`, frozen) model: AReaL's train-engine keys and its PPO keys."""

    backend: str  # megatron:dAtBpC
    path: str  # HF folder or hub name; empty: `prepare` builds the model
    dtype: str
    grad_reduce_dtype: str
    init_from_scratch: bool
    mb_spec: MicroBatchSpec
    optimizer: OptimizerConfig | None
    gradient_checkpointing: bool
    weight_update_mode: str = "disk"
    temperature: float
    ppo_n_minibatches: int
    eps_clip: float
    eps_clip_higher: float | None
    c_clip: float | None
    kl_ctl: float
    kl_estimator: str
    discount: float
    gae_lambda: float
    reward_scaling: float
    reward_bias: float
    reward_clip: float
    reward_norm: NormConfig | None
    adv_norm: NormConfig | None
    mask_no_eos_with_zero: bool
    recompute_logprob: bool
    use_decoupled_loss: bool
    prox_logp_method: str
    importance_sampling_level: str
    rejection_sampling: RejectionSamplingConfig | None


@dataclass(frozen=True, kw_only=True)
class ClusterSpecConfig:
    fileroot: str = "runs"  # run directories go to fileroot/experiment_name/trial_name
    n_nodes: int = 1
    n_gpus_per_node: int


@dataclass(frozen=True, kw_only=True)
class TrainDatasetConfig:
    path: str = ""
    type: str = "rl"
    split: str
    batch_size: int  # prompts per step
    shuffle: bool
    max_length: int | None


@dataclass(frozen=True, kw_only=True)
class ValidDatasetConfig:
    path: str = ""
    type: str = "rl"
    split: str
    batch_size: int
    shuffle: bool
    max_length: int | None


@dataclass(frozen=True, kw_only=True)
class SaverConfig:
    freq_epochs: int | None
    freq_steps: int | None
    freq_secs: int | None


@dataclass(frozen=True, kw_only=True)
class RecoverConfig:
    mode: Literal["disabled", "off", "auto", "on"]
    freq_epochs: int | None
    freq_steps: int | None
    freq_secs: int | None

    @property
    def enabled(self) -> bool:
        """Whether periodic checkpoints to recover from are wanted."""
        return self.mode in ("auto", "on")


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
    freq_epochs: int | None
    freq_steps: int | None
    freq_secs: int | None  # only null: ranks and a repetition of the run must agree on when to evaluate
    eval_before_train: bool = True


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    model_path: str
    dtype: str
    context_length: int | None
    mem_fraction_static: float | None
    max_running_requests: int | None
    attention_backend: str | None
    random_seed: int
    skip_tokenizer_init: bool
    log_level: str


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """`econfig`: the tau2 environment; AReaL's tau2 example has all of these but `split`."""

    domain: str = "mock"
    split: str = "train"
    max_steps: int = 50
    add_thinking_tool: bool = False
    solo_mode: bool = False
    user_llm_base_url: str | None = None
    user_llm: str | None = None  # null with tau2, whose user is scripted here
    user_llm_args: dict[str, Any] | None = None
    turn_discount: float = 1.0
    invalid_format_penalty: float = 0.1


@dataclass(frozen=True, kw_only=True)
class DtaConfig:
    plan: Literal["auto", "classic", "sparse", "dense"] = "auto"
    max_block_tokens: int = 2048
    activation_budget: Bytes = Bytes(0)  # peak of a walk: graphs, stack and the block at work; 0: automatic
    leaf_merge: bool = True
    cut_tail: bool = True
    order: Literal["lexicographic", "heavy_first", "heavy_last"] = "lexicographic"
    fused_loss: bool = False  # the PPO loss inside the walk, where its log-probs would need a walk of their own
    calibrate: bool = False  # measure block shapes at the start of a run
    max_len: int = 32768  # tokens of one training sequence
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"


@dataclass(frozen=True, kw_only=True)
class BatcherConfig:
    port: int = 0  # 0: any free port
    partition: Literal["refined", "contiguous", "ffd_tokens", "ffd_tree"] = "refined"
    cost: Literal["flops", "tree_tokens", "time"] = "flops"  # time: of the run's calibration, dta.calibrate
    staleness_policy: Literal["wait", "drop", "mask", "keep"] = "wait"
    lease_timeout_s: float = 60.0
    max_attempts: int = 3
    intake_limit: int = 4096  # episodes held before workers are told to wait
    spool_bytes: Bytes = Bytes(64 << 30)  # of the log on disk before workers are told to wait
    min_group_size: int | None = None  # fewest episodes a group is trained with; null: two (one if n_samples is 1)
    filter_equal_rewards: bool = False  # drop groups whose episodes all have one reward
    stale_reissues: int = 1  # times that a prompt is sampled again after its group was dropped as stale
    dump_traces: bool = False
    group_timeout_s: float | None = None  # null: time for all attempts of an episode


@dataclass(frozen=True, kw_only=True)
class EmbeddedConfig:
    ports: tuple[int, ...] = ()  # one per server; empty: any free ports
    max_batch: int = 32
    max_total_tokens: int = 65536
    max_prefill_tokens: int = 2048  # new prompt tokens of one step
    max_waiting: int = 8192  # waiting requests above this are refused with a 503
    while_released: Literal["wait", "refuse"] = "wait"  # requests while the KV memory is given back
    reasoning_parser: Literal["none", "qwen3"] = "none"  # splits <think>...</think> off chat replies
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class TltConfig:
    enabled: bool = True  # speculative decoding in the embedded servers, where it is measured to be faster
    drafter: str | None = None  # folder of a trained drafter; null: n-gram drafts, until one is trained here
    arms: tuple[str, ...] = ()  # strategies to choose from, as eagle-d4-k2-v7; empty: the built-in ones
    max_batch: int | None = None  # never speculate on more sequences at once; null: measurements decide
    max_regret: float = 0.02  # share of the time that trying strategies may cost
    ngram_tokens: int = 400_000  # contexts kept for n-gram drafts
    train: bool = False  # train the drafter in idle time of the servers
    kind: Literal["eagle", "hass", "eagle3"] = "eagle"  # of a drafter that is trained from scratch
    draft_ids: str | None = None  # npy file of the draft vocabulary's target ids; null: the whole vocabulary
    learning_rate: float = 1e-3
    record_share: float = 0.25  # of the sequences whose hidden states are recorded
    record_tokens: int = 4096  # tokens of one sample at most
    buffer_bytes: Bytes = Bytes(1 << 30)  # of recorded samples, per server
    min_idle_servers: int = 1  # so many idle servers start training
    idle_s: float = 2.0  # after so long without work
    publish_steps: int = 100  # training steps between two versions of the drafter
    cores: tuple[int, ...] = ()  # CPU core for each server's drafter training; empty: not pinned


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    interval_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    host: str = "127.0.0.1"
    num_workers: int = 1
    threads_per_process: int = 1
    restart_limit: int = 3  # restarts of one process before the run fails
    start_timeout_s: float = 180.0
    stop_timeout_s: float = 30.0
    step_timeout_s: float = 1200.0
    prepare_timeout_s: float = 3600.0
    router_port: int = 0  # 0: any free port
    api_key: str | None = None  # guards every HTTP endpoint when set
    sglang_python: str = "python3"  # interpreter of the environment that holds SGLang


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """The top level. `areal_dta.config.Config` adds what belongs to a loaded file."""

    experiment_name: str
    trial_name: str = ""  # empty: a time stamp, chosen when the run is created
    seed: int
    total_train_epochs: int
    total_train_steps: int | None
    tokenizer_path: str = ""  # empty: the model's own
    async_training: bool = True
    tree_training_mode: Literal["disabled", "sparse", "dta"] = "dta"
    packing_algorithm: Literal["ffd", "dta"] = "dta"
    workflow: str  # dotted name of a RolloutWorkflow class
    prepare: str | None = None  # dotted name of a function (config, run_dir), run once before the launch
    workflow_args: dict[str, Any] = field(default_factory=dict)  # free keys for `workflow`
    prepare_args: dict[str, Any] = field(default_factory=dict)  # free keys for `prepare`
    cluster: ClusterSpecConfig
    rollout: InferenceEngineConfig
    gconfig: GenerationHyperparameters
    eval_gconfig: GenerationHyperparameters | None
    actor: PPOActorConfig
    ref: PPOActorConfig | None
    train_dataset: TrainDatasetConfig
    valid_dataset: ValidDatasetConfig | None
    saver: SaverConfig
    recover: RecoverConfig
    evaluator: EvaluatorConfig
    sglang: SGLangConfig
    econfig: EnvConfig
    dta: DtaConfig
    batcher: BatcherConfig
    embedded: EmbeddedConfig
    tlt: TltConfig
    telemetry: TelemetryConfig
    runtime: RuntimeConfig
