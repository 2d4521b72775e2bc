"""Two tensor-parallel ranks, with and without sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_dta.engine import DenseEngine, Rows, TreeEngine
from areal_dta.engine.hf import TensorReader, to_megatron
from tests.parity.cases_dp import continues_to_the_single_process_weights
from tests.parity.cases_single import ADAM, reference_coefficients
from tests.parity.plans import PLANS, tree_engine
from tests.parity.support import FAMILIES, Context, assert_close, gradients
from tests.parity.tries import VOCAB, random_rows


def gradient_equals_dense_and_the_single_process(context: Context) -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        policy = context.policy(dtype)
        rows = random_rows("duplicates_and_prefixes", 31)
        coefs = reference_coefficients(rows, dtype)
        want = gradients(policy, DenseEngine(policy), rows, *coefs, temperature=0.6)
        whole = load_file(context.folder / f"reference_{dtype}.safetensors")
        norm = {"decoder.final_layernorm.weight": whole["decoder.final_layernorm.weight"]}
        qk = {name: grad for name, grad in whole.items() if "q_layernorm" in name or "k_layernorm" in name}
        assert_close(want, {**norm, **qk}, bound, "replicated parameters against the single process")
        for plan in PLANS:
            got = gradients(policy, tree_engine(policy, plan), rows, *coefs, temperature=0.6)
            assert_close(got, want, bound, f"{dtype} {plan}")


def ranks_with_different_rows_are_told(context: Context) -> None:
    """Also of the same shape, and what else must be equal: temperature, what is projected, what has a coefficient."""
    policy = context.policy()
    engine, rank = TreeEngine(policy), context.rank % (context.sizes.tp * context.sizes.pp)
    rows = random_rows("comb", 3)
    other = Rows((rows.ids_T + rank) % VOCAB, rows.offsets_S1)
    ones_T, holes_T = torch.ones(rows.num_tokens), torch.ones(rows.num_tokens)
    holes_T[:: 2 + rank] = 0
    calls: tuple[Callable[[], object], ...] = (
        lambda: engine.forward(random_rows("comb", rank)),
        lambda: engine.forward(other),
        lambda: engine.forward(rows, 1.0 + rank),
        lambda: engine.forward(rows, want_entropy=rank == 0),
        lambda: engine.backward(other, ones_T),
        lambda: engine.backward(rows, ones_T, None, 1.0 + rank),
        lambda: engine.backward(rows, holes_T),
        lambda: engine.backward(rows, ones_T, ones_T if rank == 0 else None),
    )
    for call in calls:
        policy.zero_grad()
        with pytest.raises(RuntimeError, match="different rows or coefficients"):
            call()


def values_equal_transformers(context: Context) -> None:
    policy = context.policy()
    model = AutoModelForCausalLM.from_pretrained(context.model(), dtype=torch.float32)
    rows = random_rows("comb", 7)
    values = TreeEngine(policy).forward(rows, 0.6, want_entropy=True)
    for row in range(rows.num_rows):
        lo, hi = rows.offsets_S1[row], rows.offsets_S1[row + 1]
        ids = torch.from_numpy(rows.ids_T[lo:hi]).long()
        with torch.no_grad():
            log_p = (model(ids[None]).logits[0] / 0.6).log_softmax(-1)[:-1]
        entropy = -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(
            values.logprobs_T[lo : hi - 1], log_p.gather(1, ids[1:, None])[:, 0], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(values.entropy_T[lo : hi - 1], entropy, atol=1e-5, rtol=0)


def hf_round_trip_is_bit_exact(context: Context) -> None:
    for family in FAMILIES:
        target = context.folder / f"roundtrip_tp_{family}"
        policy = context.policy(family=family)
        policy.save_hf(target)
        want, got = load_file(context.model(family) / "model.safetensors"), load_file(target / "model.safetensors")
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want)
        reader = TensorReader(target)
        for name, param in policy.model.named_parameters():
            assert torch.equal(param, to_megatron(name, reader, policy.shape, policy.tp_rank, 2))


def checkpoint_of_two_data_parallel_ranks_continues(context: Context) -> None:
    policy = context.policy(optimizer=ADAM)
    policy.load_checkpoint(context.folder / "checkpoint_dp2")
    name = "tp2sp" if context.sizes.sequence_parallel else "tp2"
    continues_to_the_single_process_weights(policy, context, slice(None), name)


CASES = (
    gradient_equals_dense_and_the_single_process,
    values_equal_transformers,
    hf_round_trip_is_bit_exact,
    ranks_with_different_rows_are_told,
    checkpoint_of_two_data_parallel_ranks_continues,
)
SP_CASES = (gradient_equals_dense_and_the_single_process, checkpoint_of_two_data_parallel_ranks_continues)
