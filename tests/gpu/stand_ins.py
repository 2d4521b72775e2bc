"""Plain products behind the names and arguments of PyTorch's CUDA attention operators, for rehearsals on the CPU.

They enforce what the real ones check: layout, alignment, the log-sum-exp's padding. fp64 inputs keep fp64 throughout,
so that the algebra around them can be tested.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from areal_dta.engine.kernels_cuda import padded_lse

__all__ = ["EfficientStandIn", "FlashStandIn"]


def _scores(q_BSNH, k_BKNH, scale, bias, is_causal, bottom_right):
    repeats = q_BSNH.shape[2] // k_BKNH.shape[2]
    q, k = q_BSNH.transpose(1, 2), k_BKNH.transpose(1, 2).repeat_interleave(repeats, 1)
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias.double()
    if is_causal:
        s, n = scores.shape[-2:]
        hidden = torch.ones(s, n, dtype=torch.bool).triu(1 + (n - s if bottom_right else 0))
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _attend(q, k, v, scale, bias, is_causal, bottom_right):
    scores = _scores(q, k, scale, bias, is_causal, bottom_right)
    lse_BNS = scores.logsumexp(-1)
    weights = (scores - lse_BNS.unsqueeze(-1)).exp()  # NaN where a row sees nothing: the wrapper must cope
    v = v.transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], 1).double()
    return (weights @ v).transpose(1, 2).to(q.dtype), lse_BNS.to(_wide(q))


def _wide(x):
    """The log-sum-exp's type: fp32, so that the real operators take it back; fp64 for the algebra tests."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _attend_backward(grad, q, k, v, out, lse_BNS, scale, bias, is_causal, bottom_right):
    weights = (_scores(q, k, scale, bias, is_causal, bottom_right) - lse_BNS.double().unsqueeze(-1)).exp()
    heads, repeats = k.shape[2], q.shape[2] // k.shape[2]
    g = grad.transpose(1, 2).double()
    k_rep, v_rep = (x.transpose(1, 2).repeat_interleave(repeats, 1).double() for x in (k, v))
    delta = (g * out.transpose(1, 2).double()).sum(-1, keepdim=True)
    d_scores = weights * (g @ v_rep.transpose(-1, -2) - delta) * scale
    d_q = (d_scores @ k_rep).transpose(1, 2)
    d_k = (d_scores.transpose(-1, -2) @ q.transpose(1, 2).double()).transpose(1, 2)
    d_v = (weights.transpose(-1, -2) @ g).transpose(1, 2)
    d_k, d_v = (x.unflatten(2, (heads, repeats)).sum(3) for x in (d_k, d_v))
    return tuple(x.to(q.dtype) for x in (d_q, d_k, d_v))


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(what)


def _check_qkv(q, k, v) -> None:
    for x in (q, k, v):
        _require(x.dim() == 4 and x.stride(-1) == 1, "4 dimensions, the last one contiguous")
        _require(x.dtype == q.dtype and x.shape[0] == q.shape[0], "one dtype, one batch size")
    _require(k.shape[:3] == v.shape[:3], "keys and values alike")


def _bound(name: str, args: tuple, kwargs: dict) -> SimpleNamespace:
    """The arguments of an operator by the names of its installed schema; TypeError where they do not fit it."""
    schema = getattr(torch.ops.aten, name).default._schema
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    given = {argument.name: value for argument, value in zip(positional, args, strict=False)}
    known = {argument.name for argument in schema.arguments}
    if len(args) > len(positional) or not kwargs.keys() <= known or kwargs.keys() & given.keys():
        raise TypeError(f"{name}: {len(args)} arguments and {sorted(kwargs)} do not fit {schema}")
    bound = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    bound |= given | kwargs
    if missing := known - bound.keys():
        raise TypeError(f"{name}: {sorted(missing)} are missing")
    return SimpleNamespace(**bound)


class FlashStandIn:
    """``aten._flash_attention_*``: batch, sequence, heads, head dim; fewer key heads allowed; bottom-right causal."""

    def _flash_attention_forward(self, *args, **kwargs):
        x = _bound("_flash_attention_forward", args, kwargs)
        _check_qkv(x.query, x.key, x.value)
        _require(x.cum_seq_q is None and x.cum_seq_k is None, "dense problems")
        _require(not x.dropout_p and not x.return_debug_mask, "no dropout")
        _require(x.query.shape[-1] % 8 == 0 and x.query.shape[2] % x.key.shape[2] == 0, "head dim, number of heads")
        _require((x.max_q, x.max_k) == (x.query.shape[1], x.key.shape[1]), "lengths")
        out, lse = _attend(x.query, x.key, x.value, x.scale, None, x.is_causal, bottom_right=True)
        return out, lse, torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def _flash_attention_backward(self, *args, **kwargs):
        x = _bound("_flash_attention_backward", args, kwargs)
        _check_qkv(x.query, x.key, x.value)
        _require(x.grad_out.shape == x.query.shape == x.out.shape, "gradient and output like the query")
        _require(x.logsumexp.shape == (x.query.shape[0], x.query.shape[2], x.query.shape[1]), "log-sum-exp B N S")
        _require(x.logsumexp.is_contiguous() and x.logsumexp.dtype == _wide(x.query), "log-sum-exp is read raw")
        return _attend_backward(
            x.grad_out, x.query, x.key, x.value, x.out, x.logsumexp, x.scale, None, x.is_causal, bottom_right=True
        )


class EfficientStandIn:
    """``aten._efficient_attention_*``: batch, sequence, heads, head dim; as many key heads; top-left causal."""

    def __init__(self) -> None:
        self.biases: list[torch.Tensor] = []

    def _check_bias(self, bias, q, k) -> None:
        if bias is None:
            return
        self.biases.append(bias)
        _require(bias.dtype == q.dtype and bias.stride(3) == 1, "bias in the query's dtype, rows contiguous")
        _require(bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), "bias B N S K")
        _require(all(bias.stride(i) % 8 == 0 for i in range(3) if bias.shape[i] > 1), "bias strides by 8")
        _require(bias.data_ptr() % 16 == 0, "bias pointer")

    def _efficient_attention_forward(self, *args, **kwargs):
        x = _bound("_efficient_attention_forward", args, kwargs)
        _check_qkv(x.query, x.key, x.value)
        _require(x.query.shape[2] == x.key.shape[2], "one key head per query head")
        _require(not x.dropout_p and x.compute_log_sumexp and x.cu_seqlens_q is None, "dense, with log-sum-exp")
        self._check_bias(x.bias, x.query, x.key)
        out, lse = _attend(x.query, x.key, x.value, x.scale, x.bias, x.custom_mask_type == 1, bottom_right=False)
        return out, padded_lse(lse.transpose(1, 2)), None, None, x.query.shape[1], x.key.shape[1]

    def _efficient_attention_backward(self, *args, **kwargs):
        x = _bound("_efficient_attention_backward", args, kwargs)
        _check_qkv(x.query, x.key, x.value)
        self._check_bias(x.bias, x.query, x.key)
        s = x.query.shape[1]
        _require(x.query.shape[2] == x.key.shape[2] and x.out.is_contiguous(), "as the forward")
        _require(not x.bias_requires_grad and (x.max_seqlen_q, x.max_seqlen_k) == (s, x.key.shape[1]), "lengths")
        _require(x.logsumexp.shape[-1] % 32 == 0 and x.logsumexp.is_contiguous(), "log-sum-exp padded to 32")
        _require(x.logsumexp.dtype == _wide(x.query), "log-sum-exp in fp32")
        _require(bool((x.logsumexp[..., s:] == math.inf).all()), "padding weighs nothing")
        lse, causal = x.logsumexp[..., :s], x.custom_mask_type == 1
        grads = _attend_backward(
            x.grad_out_, x.query, x.key, x.value, x.out, lse, x.scale, x.bias, causal, bottom_right=False
        )
        return *grads, None
