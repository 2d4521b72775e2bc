"""What parity cases share: tiny models on disk, random coefficients, gradients of an engine, error measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from areal_dta.engine import (
    DenseEngine,
    Engine,
    MegatronPolicy,
    OptimizerSettings,
    ParallelSizes,
    Rows,
    TreeEngine,
)
from tests.parity.tries import VOCAB, random_rows

SEED = 11
FAMILIES = ("qwen3", "qwen2", "llama")
LOSS_CASES = (  # named here because their module imports AReaL
    "policy_losses_equal_autograd_of_the_whole_loss_fp32",
    "policy_losses_equal_autograd_of_the_whole_loss_fp64",
    "value_losses_equal_autograd_of_the_whole_loss_fp32",
    "value_losses_equal_autograd_of_the_whole_loss_fp64",
    "ratios_on_a_clip_boundary_may_flip_and_nothing_else_does",
    "five_ppo_steps_equal_training_on_dense_rows",
)
worst_errors: dict[float, float] = {}  # by bound: the largest error a case saw, for the worker's log


@dataclass(frozen=True)
class Context:
    """Where a worker of a layout runs."""

    rank: int
    sizes: ParallelSizes
    folder: Path  # shared by all layouts of a session: models, reference gradients, checkpoints

    def model(self, family: str = "qwen3") -> Path:
        return self.folder / family

    def policy(
        self, dtype: torch.dtype = torch.float32, optimizer: OptimizerSettings | None = None, family: str = "qwen3"
    ) -> MegatronPolicy:
        return MegatronPolicy(self.model(family), self.sizes, optimizer, dtype, seed=SEED, timeout_s=60)

    def critic(
        self, dtype: torch.dtype = torch.float32, optimizer: OptimizerSettings | None = None, family: str = "qwen3"
    ) -> MegatronPolicy:
        """A critic that starts from a policy's folder, with a head large enough for values of order 1."""
        critic = MegatronPolicy(
            self.model(family), self.sizes, optimizer, dtype, seed=SEED, value_head=True, timeout_s=60
        )
        if critic.is_last_stage:
            with torch.no_grad():
                critic.value_layer().weight.mul_(10)
                critic.value_layer().bias.fill_(0.25)
            if critic.optimizer is not None:
                critic.optimizer.reload_model_params()
        return critic


def write_models(folder: Path) -> None:
    """One small Hugging Face model per family, weights large enough that attention is not uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    common = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
    }  # fmt: skip
    torch.manual_seed(SEED)
    models = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**common, head_dim=16, tie_word_embeddings=True)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**common, tie_word_embeddings=False)),
        "llama": LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=False)),
    }
    for family, model in models.items():
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "norm" in name:
                    param.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    param.normal_(std=0.3)
                else:
                    param.mul_(4)
        model.float().save_pretrained(folder / family)
        (folder / family / "tokenizer.json").write_text(json.dumps({"family": family}))


def coefficients(rows: Rows, seed: int, dtype: torch.dtype, zero_share: float = 0.3) -> torch.Tensor:
    """Random dL/dlogp (or dL/dentropy), some exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows.num_tokens, generator=generator, dtype=torch.float64)
    values[torch.rand(rows.num_tokens, generator=generator) < zero_share] = 0
    return values.to(dtype)


def gradients(
    policy: MegatronPolicy, engine: Engine, rows: Rows, dlogp: torch.Tensor, dentropy: torch.Tensor | None = None,
    temperature: float = 1.0, mask: np.ndarray | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Gradients summed over ranks, complete on every rank."""
    policy.zero_grad()
    engine.backward(rows, dlogp, dentropy, temperature, mask_T=mask, sync="full")
    return {name: grad.clone() for name, grad in policy.gradients().items()}


def value_gradients(
    critic: MegatronPolicy, engine: Engine, rows: Rows, dvalue: torch.Tensor, mask: np.ndarray | None = None
) -> dict[str, torch.Tensor]:
    """As `gradients`, of a critic."""
    critic.zero_grad()
    engine.backward_values(rows, dvalue, mask_T=mask, sync="full")
    return {name: grad.clone() for name, grad in critic.gradients().items()}


def worst_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest relative error ``|got - want| / |want|`` over parameters (absolute where ``want`` is 0)."""
    worst = 0.0
    for name, reference in want.items():
        scale = float(reference.double().norm()) or 1.0
        error = float((got[name].double() - reference.double()).norm()) / scale
        assert np.isfinite(error), f"{name}: gradient is not finite"
        worst = max(worst, error)
    return worst


def whole_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Relative error of all parameters' gradients together."""
    difference = sum(float((got[name].double() - want[name].double()).norm()) ** 2 for name in want)
    return (difference / sum(float(reference.double().norm()) ** 2 for reference in want.values())) ** 0.5


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], bound: float, what: str = "") -> None:
    assert any(float(t.abs().max()) > 0 for t in want.values()), f"{what}: reference gradient is zero everywhere"
    error = worst_error(got, want)
    worst_errors[bound] = max(worst_errors.get(bound, 0.0), error)
    assert error <= bound, f"{what}: relative error {error:.2e} exceeds {bound:.0e}"


def assert_low_no_worse_than_dense(
    exact: MegatronPolicy,
    low: MegatronPolicy,
    gradients_of: Callable[[MegatronPolicy, Engine, Rows, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    """The tree's error in the precision of ``low`` against that of dense rows in the same."""
    engines: list[Engine] = [TreeEngine(low), DenseEngine(low)]
    errors = np.zeros(2)  # of one batch they scatter by a fifth
    for seed in range(6):
        rows = random_rows("three_levels", seed)
        coefficients_T = coefficients(rows, seed, torch.float32)
        want = gradients_of(exact, DenseEngine(exact), rows, coefficients_T)
        errors += [whole_error(gradients_of(low, engine, rows, coefficients_T), want) for engine in engines]
    assert errors[0] <= 1.1 * errors[1], f"tree and dense, sum of six batches: {errors}"
