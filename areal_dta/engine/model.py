"""Build a Megatron GPTModel for a Hugging Face model's shape, with the tree's core attention in every layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from areal_dta.engine.activation import SwiGLU
from areal_dta.engine.attention import TreeAttention
from areal_dta.engine.hf import ModelShape
from areal_dta.engine.norm import RMSNorm
from areal_dta.engine.settings import ParallelSizes
from areal_dta.engine.value_head import value_projection

__all__ = ["build_model", "transformer_config"]


def transformer_config(shape: ModelShape, sizes: ParallelSizes, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration: no dropout, no recomputation (the walk decides that), gradients summed over ranks.

    ``calculate_per_token_loss`` makes the data-parallel reduction a plain sum; the default divides by its size.
    """
    on_cuda = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=shape.init_std,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        sequence_parallel=sizes.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_cuda,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        use_te_activation_func=True,  # lets the layer spec name the module: ours
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _local_spec(shape: ModelShape, num_layers: int) -> TransformerBlockSubmodules:
    """Megatron's own modules for the layers of one stage, with our norm (marks sequence parallelism) and our core
    attention.
    """
    layer = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.mlp.submodules.activation_func = SwiGLU
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TreeAttention
    if shape.qk_norm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def _transformer_engine_spec(shape: ModelShape) -> ModuleSpec:
    """Transformer Engine's projections and norms with our core attention. Not yet run on a GPU (docs/gpu.md)."""
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    layer.submodules.self_attention.submodules.core_attention = TreeAttention
    layer.submodules.mlp.submodules.activation_func = SwiGLU
    return layer


def build_model(shape: ModelShape, sizes: ParallelSizes, dtype: torch.dtype, seed: int) -> GPTModel:
    """This rank's part of a GPTModel with Megatron's own initialisation; process groups and RNG must be set up.
    ``seed`` starts a value head, which is equal on all ranks.

    Raises ValueError when heads, groups, FFN or vocabulary do not divide by ``tp``, or the layers by ``pp``.
    """
    if shape.num_layers % sizes.pp:
        raise ValueError(
            f"the model's {shape.num_layers} layers do not divide into pp={sizes.pp} pipeline stages; "
            "choose a pp that divides them"
        )
    for name in ("num_heads", "num_kv_heads", "ffn", "vocab"):
        if getattr(shape, name) % sizes.tp:
            raise ValueError(f"{name}={getattr(shape, name)} is not divisible by tp={sizes.tp}; choose a smaller tp")
    num_local_layers = shape.num_layers // sizes.pp
    # Transformer Engine multiplies fp32 in TF32 and has no fp64: parity needs Megatron's own layers there
    has_te = HAVE_TE and torch.cuda.is_available() and dtype in (torch.bfloat16, torch.float16)
    spec = _transformer_engine_spec(shape) if has_te else _local_spec(shape, num_local_layers)
    model = GPTModel(
        config=transformer_config(shape, sizes, dtype),
        transformer_layer_spec=spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta) if float(shape.rope_theta).is_integer() else shape.rope_theta,
        rope_scaling=shape.rope_factor is not None,
        rope_scaling_factor=shape.rope_factor or 8.0,
    )
    if shape.value_head and model.post_process:
        model.output_layer = value_projection(shape.hidden, shape.init_std, dtype, seed)
    for index, layer in enumerate(model.decoder.layers):
        layer.self_attention.core_attention.layer = index  # of this stage's stack; Megatron numbers the whole model
    return model
