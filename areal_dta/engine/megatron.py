"""A policy: Megatron GPTModel, gradient buffers, ZeRO-1 Adam, weights in and out.

A pipeline stage holds consecutive layers, the first also the embedding, the last the final norm and the output
projection. Parameters go by the names they have in the whole model.

Legend of shapes: S rows of a block, D hidden, J half the head dim.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer

from areal_dta.engine import checkpoint, cpu, hf
from areal_dta.engine.attention import BlockContext, keys_and_values_only
from areal_dta.engine.gather import hf_tensors
from areal_dta.engine.groups import init_model_parallel, pipeline_groups
from areal_dta.engine.head import VocabHead
from areal_dta.engine.model import build_model
from areal_dta.engine.pipeline import StageLink
from areal_dta.engine.rows import GradientSync
from areal_dta.engine.settings import OptimizerSettings, ParallelSizes, StepResult
from areal_dta.engine.value_head import ValueHead
from areal_dta.tree.memory import MemoryModel

__all__ = ["MegatronPolicy"]


class MegatronPolicy:
    """One rank's part of a policy. Every method that communicates must be called by all ranks of the grid.

    Args:
        hf_path: folder with config.json, tokenizer files and safetensors.
        sizes: process grid; torch.distributed must be initialised with that many ranks.
        optimizer: Adam settings; None builds gradient buffers without an optimizer (required for float64).
        dtype: of parameters and activations; gradients are fp32 (fp64 for float64).
        seed: of Megatron's RNG and of random initial weights; the same on all ranks.
        trainable: False builds neither gradient buffers nor optimizer (reference policies).
        random_init: start from Megatron's initialisation, whatever weights the folder holds.
        value_head: a critic: one value per position instead of log-probs. A causal model's folder gives it everything
            but the head, which starts at random.

    Gradients are sums over data-parallel ranks: nothing divides by the number of ranks or tokens.
    """

    def __init__(
        self, hf_path: str | Path, sizes: ParallelSizes | None = None, optimizer: OptimizerSettings | None = None,
        dtype: torch.dtype = torch.float32, seed: int = 0, *, trainable: bool = True, random_init: bool = False,
        value_head: bool = False, timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        cpu.install()
        self.hf_path, self.sizes, self.dtype, self.seed = Path(hf_path), sizes or ParallelSizes(), dtype, seed
        self.optimizer_settings = optimizer
        if optimizer is not None and (dtype == torch.float64 or not trainable):
            raise ValueError("an optimizer needs trainable=True and float32 or bfloat16; pass optimizer=None")
        init_model_parallel(self.sizes, timeout_s)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.shape = hf.read_shape(self.hf_path, value_head)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.model = build_model(self.shape, self.sizes, dtype, seed).to(self.device)
        self.num_steps = 0
        self._reduced = self._incomplete = False
        self._freqs: torch.Tensor | None = None
        self.ddp = self._wrap() if trainable else None
        self.optimizer = self._build_optimizer(optimizer) if optimizer else None
        if not random_init:
            self.load_hf(self.hf_path)

    # ---- construction ----

    def _wrap(self) -> DistributedDataParallel:
        """Contiguous gradient buffers. Overlapped reduction stays off: the number of backwards changes each step."""
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=self.optimizer_settings is not None,
            grad_reduce_in_fp32=self.dtype != torch.float64,
            overlap_grad_reduce=False,
        )
        return DistributedDataParallel(self.model.config, config, self.model)

    def _build_optimizer(self, settings: OptimizerSettings) -> MegatronOptimizer:
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_grad=settings.gradient_clipping,
            use_distributed_optimizer=True,
            bf16=self.dtype == torch.bfloat16,
            params_dtype=self.dtype,
        )
        optimizer = get_megatron_optimizer(config, [self.ddp])
        for inner in checkpoint.adam_instances(optimizer):
            for group in inner.param_groups:
                # Megatron marks norms and biases with wd_mult 0 and leaves applying it to a scheduler not used here.
                group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)
                for param in group["params"]:  # torch's Adam starts without state, a checkpoint needs it
                    zero = torch.zeros_like
                    inner.state[param] = {"step": torch.tensor(0.0), "exp_avg": zero(param), "exp_avg_sq": zero(param)}
        return optimizer

    # ---- where this rank is ----

    @property
    def dp_rank(self) -> int:
        return int(parallel_state.get_data_parallel_rank())

    @property
    def tp_rank(self) -> int:
        return int(parallel_state.get_tensor_model_parallel_rank())

    @property
    def stage(self) -> int:
        """Position in the pipeline, from 0."""
        return int(parallel_state.get_pipeline_model_parallel_rank())

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.sizes.pp - 1

    @property
    def num_local_kv_heads(self) -> int:
        return self.shape.num_kv_heads // self.sizes.tp

    @property
    def num_local_layers(self) -> int:
        return self.shape.num_layers // self.sizes.pp

    def stage_link(self) -> StageLink | None:
        """A new link to the neighbouring stages; None without a pipeline. All stages ask at the same time."""
        groups = pipeline_groups()
        return None if groups is None else StageLink(self.stage, groups, self.dtype, self.device)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by the names they have in the whole model.

        With tied embeddings the last stage has a copy of the embedding, under the embedding's name.
        """
        first_layer = self.stage * self.num_local_layers
        for name, param in self.model.named_parameters():
            if self.shape.tied and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"
            yield hf.shifted(name, first_layer), param

    # ---- computing ----

    def rope_freqs(self, num_positions: int) -> torch.Tensor:
        """Rotary angles ``[positions, 1, 1, H]`` in fp32 for positions 0 .. at least num_positions-1."""
        if self._freqs is None or len(self._freqs) < num_positions:
            self._freqs = self.model.rotary_pos_emb(1 << max(9, (num_positions - 1).bit_length()))
        return self._freqs

    def stage_shape(self, num_rows: int) -> tuple[int, int, int]:
        """Shape of the hidden states of ``num_rows`` rows between two stages, on one tensor-parallel rank."""
        if self.sizes.sequence_parallel:
            num_rows = -(-num_rows // self.sizes.tp)
        return num_rows, 1, self.shape.hidden

    def block_hidden(
        self, ids_S: torch.Tensor, block: BlockContext, stage_input: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Final-norm hidden states ``[S, D]`` of a block of trie tokens; its keys and values go to its stack.

        In a pipeline, ``stage_input`` is the output of the stage before; all stages but the last give theirs in the
        shape of `stage_shape`.
        """
        hidden = self.model.decoder(self._embedded(ids_S, stage_input), attention_mask=block)
        return self._full_rows(hidden)[: len(ids_S), 0] if self.is_last_stage else hidden

    def block_keys(
        self, ids_S: torch.Tensor, block: BlockContext, stage_input: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `block_hidden` on the last stage, but the last layer stops after its keys and values.

        Returns the root of their graph, a zero: its backward takes the gradients that descendants left on the path.
        """
        hidden, layers = self._embedded(ids_S, stage_input), self.model.decoder.layers
        hidden = stage_input if hidden is None else hidden
        for layer in layers[:-1]:
            hidden, _ = layer(hidden, attention_mask=block)
        last = layers[-1]
        _, key, value = last.self_attention.get_query_key_value_tensors(last.input_layernorm(hidden), None)
        return keys_and_values_only(key, value, block, last.self_attention.core_attention.layer)

    def memory_model(self) -> MemoryModel:
        """Analytic estimate of what this rank's part of the model needs per token."""
        shape = self.shape
        return MemoryModel.of_shape(
            hidden=shape.hidden, num_layers=self.num_local_layers, num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, ffn=shape.ffn, vocab=shape.vocab,
            element_bytes=self.dtype.itemsize, tp=self.sizes.tp,
        )  # fmt: skip

    def row_hidden(self, ids_S: torch.Tensor, stage_input: torch.Tensor | None = None) -> torch.Tensor:
        """Final-norm hidden states ``[S, D]`` of one whole row, through Megatron's own rotary embedding.

        Stages of a pipeline as in `block_hidden`.
        """
        num_rows = len(ids_S) if not self.sizes.sequence_parallel else -(-len(ids_S) // self.sizes.tp) * self.sizes.tp
        freqs = self.rope_freqs(num_rows)[:num_rows]
        hidden = self.model.decoder(self._embedded(ids_S, stage_input), attention_mask=None, rotary_pos_emb=freqs)
        return self._full_rows(hidden)[: len(ids_S), 0] if self.is_last_stage else hidden

    def _embedded(self, ids_S: torch.Tensor, stage_input: torch.Tensor | None) -> torch.Tensor | None:
        """What enters this stage's first layer; a later stage's decoder reads it from its input tensor instead."""
        if self.stage > 0:
            assert stage_input is not None, "only the first stage makes its own input"
            self.model.decoder.set_input_tensor(stage_input)
            return None
        pad = -len(ids_S) % self.sizes.tp if self.sizes.sequence_parallel else 0
        return self.model.embedding(torch.nn.functional.pad(ids_S, (0, pad)).unsqueeze(0), None)

    def check_same_program(self, parts: Callable[[], Iterable[bytes]]) -> None:
        """Raise RuntimeError unless all ranks that share a model walk the same program (else they would hang).

        ``parts`` gives the bytes that must be equal; it is called where there is another rank to compare with.
        """
        if self.sizes.tp * self.sizes.pp == 1:
            return
        hasher = hashlib.sha256()
        for part in parts():
            hasher.update(part)
        number = int(hasher.hexdigest()[:15], 16)
        extremes = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=parallel_state.get_model_parallel_group())
        if extremes.tolist() != [number, -number]:
            raise RuntimeError(
                "tensor- and pipeline-parallel ranks of one model were given different rows or coefficients; "
                "give all the same shard"
            )

    def _full_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Undo sequence parallelism; all ranks compute the same from here, so the gradient is split, not summed."""
        if not self.sizes.sequence_parallel:
            return hidden
        return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)

    def head_weight(self) -> torch.nn.Parameter:
        """The output projection of this rank ``[vocab / tp, D]`` (the embedding when tied); last stage only."""
        self._require_head(value=False)
        return self.model.shared_embedding_or_output_weight() if self.shape.tied else self.model.output_layer.weight

    def vocab_head(self) -> VocabHead | None:
        """The head of log-probs, on the last stage. Raises ValueError on all stages of a critic."""
        self._require_head(value=False)
        if not self.is_last_stage:
            return None
        weight = self.head_weight()
        group = parallel_state.get_tensor_model_parallel_group()
        return VocabHead(weight, getattr(weight, "main_grad", None), self.tp_rank * weight.shape[0], group)

    def value_layer(self) -> torch.nn.Linear:
        """A critic's projection to one value, the same on all tensor-parallel ranks; last stage only."""
        self._require_head(value=True)
        return self.model.output_layer

    def value_head(self) -> ValueHead | None:
        """The head of a critic, on the last stage. Raises ValueError on all stages of another policy."""
        self._require_head(value=True)
        return ValueHead(self.value_layer()) if self.is_last_stage else None

    def _require_head(self, value: bool) -> None:
        if self.shape.value_head and not value:
            raise ValueError("a critic has no vocabulary head; use forward_values and backward_values")
        if value and not self.shape.value_head:
            raise ValueError("this policy has no value head; build it with value_head=True")

    # ---- gradients and steps ----

    def zero_grad(self) -> None:
        """Clear the gradient buffers; required before the first backward of a step."""
        self._trainable().zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self._reduced = self._incomplete = False

    def _trainable(self) -> DistributedDataParallel:
        if self.ddp is None:
            raise ValueError("this policy is forward-only; build it with trainable=True")
        return self.ddp

    def check_accumulating(self) -> None:
        """Raise RuntimeError when the buffers hold reduced gradients (adding counts ranks twice) or half of some."""
        self._trainable()
        if self._reduced:
            raise RuntimeError(
                "gradients of this step are already reduced over ranks; call zero_grad() before backward()"
            )
        if self._incomplete:
            raise RuntimeError("a backward failed half-way; call zero_grad() before the next one")

    def begin_gradients(self) -> None:
        """A backward starts adding to the buffers; until `finish_gradients` they hold a part of it."""
        self._incomplete = True

    def finish_gradients(self, sync: GradientSync) -> None:
        """Sum gradients over ranks: ``sharded`` for the optimizer, ``full`` on all ranks, ``none``: more follow."""
        self._incomplete = False
        if sync == "none":
            return
        finalize_model_grads([self._trainable()], force_all_reduce=sync == "full")
        self._reduced = True

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradient buffers by parameter name (views); complete on each rank after sync='full' only."""
        self._trainable()
        return {name: param.main_grad for name, param in self.named_parameters()}

    def optimizer_step(self, lr: float) -> StepResult:
        """Clip by the global norm, Adam with ``lr``, gather shards. A non-finite norm skips the update on all ranks."""
        if self.optimizer is None:
            raise ValueError("this policy has no optimizer; pass OptimizerSettings")
        if not self._reduced:
            raise RuntimeError(
                "optimizer_step() before gradients were reduced; the last backward() needs sync='sharded'"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            return StepResult(ok=False, grad_norm=grad_norm)
        limit = self.optimizer.config.clip_grad
        if limit > 0:
            clip_grad_by_total_norm_fp32(self.optimizer.get_parameters(), max_norm=limit, total_norm=grad_norm)
        self.optimizer.step_with_ready_grads()
        self.num_steps += 1
        return StepResult(ok=True, grad_norm=grad_norm)

    # ---- weights in and out ----

    @torch.no_grad()
    def load_hf(self, path: str | Path) -> None:
        """Load Hugging Face weights of the same shape; optimizer moments stay."""
        reader = hf.TensorReader(path)
        if not reader:
            raise FileNotFoundError(f"{path} holds no .safetensors file; a random start needs random_init=True")
        for name, param in self.named_parameters():
            part = hf.to_megatron(name, reader, self.shape, self.tp_rank, self.sizes.tp)
            if part is None:  # a causal model has no value head: it stays as it is
                continue
            if part.shape != param.shape:
                raise ValueError(f"{path}: {name} has shape {tuple(part.shape)}, expected {tuple(param.shape)}")
            param.copy_(part)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    @torch.no_grad()
    def save_hf(self, path: str | Path) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer files). All ranks call, rank 0 writes."""
        folder = Path(path)
        if self.dp_rank == 0:
            tensors = hf_tensors(self)
            if dist.get_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                hf.write_tensors(folder, tensors)
                hf.copy_side_files(self.hf_path, folder)
                if self.shape.value_head:
                    hf.write_value_config(folder, self.shape.family)
            else:
                for _ in tensors:
                    continue
        dist.barrier()

    def save_checkpoint(self, path: str | Path) -> None:
        """Write model, Adam moments, RNG and step number to ``path`` atomically; see `areal_dta.engine.checkpoint`."""
        checkpoint.save(self, Path(path))

    def load_checkpoint(
        self, path: str | Path, *, model: bool = True, optimizer: bool = True, zero_first_moment: bool = False
    ) -> None:
        """Load what `save_checkpoint` wrote, on any grid. ``model=False`` keeps the weights and takes moments only.

        ``zero_first_moment`` clears Adam's first moment, not the second. Raises CheckpointError for a torn or foreign
        folder.
        """
        checkpoint.load(self, Path(path), model=model, optimizer=optimizer, zero_first_moment=zero_first_moment)
