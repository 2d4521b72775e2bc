"""AReaL's unmodified client for contract tests: an engine, a workflow, and log-probs by a dense forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from areal.api import ModelRequest, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.utils import name_resolve

from areal_dta.nn import DecoderConfig, load_decoder
from areal_dta.nn.decoder import DecoderWeights, sequence_logits
from tests.unit.server_kit import call, wait_until

PROMPT = list(range(2, 40))
WAIT_S = 60.0


@contextmanager
def areal_engine(addresses: Sequence[str], root: Path) -> Iterator[RemoteSGLangEngine]:
    """AReaL's client before ``addresses``, one data-parallel replica each; ``root`` keeps its names."""
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(root)))
    config = InferenceEngineConfig(
        experiment_name="contract",
        trial_name=root.name,
        max_concurrent_rollouts=16,
        consumer_batch_size=8,
        max_head_offpolicyness=8,
        backend=f"sglang:d{len(addresses)}",
        request_timeout=WAIT_S,
        setup_timeout=WAIT_S,
        pause_grace_period=0.1,
    )
    engine = RemoteSGLangEngine(config)
    hosts = [urlsplit(address).netloc for address in addresses]
    engine.initialize(engine_id="0", addr=hosts, train_data_parallel_size=1)
    try:
        yield engine
    finally:
        engine.destroy()


class Completion(RolloutWorkflow):
    """One sampled completion as a training row."""

    def __init__(self, new_tokens: int) -> None:
        self.gconfig = GenerationHyperparameters(
            n_samples=1, max_new_tokens=new_tokens, temperature=0.8, ignore_eos=True
        )

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        answer = await engine.agenerate(ModelRequest(input_ids=list(data["ids"]), gconfig=self.gconfig))
        prompt, output = answer.input_len, answer.output_len
        return {
            "input_ids": torch.tensor([answer.input_tokens + answer.output_tokens]),
            "loss_mask": torch.tensor([[0] * prompt + [1] * output]),
            "logprobs": torch.tensor([[0.0] * prompt + answer.output_logprobs]),
            "versions": torch.tensor([[-1] * prompt + answer.output_versions]),
            "attention_mask": torch.ones(1, prompt + output, dtype=torch.bool),
            "rewards": torch.tensor([1.0]),
        }


def weights_of(folder: Path) -> DecoderWeights:
    return load_decoder(folder, DecoderConfig.from_folder(folder), torch.float32)


def logprobs_by(weights: DecoderWeights, row: dict[str, torch.Tensor], temperature: float = 0.8) -> torch.Tensor:
    """Log-prob of every token but the first by a dense forward; index i is token i+1."""
    ids = row["input_ids"][0].tolist()
    logits = sequence_logits(weights, ids)[:-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def wait_for(engine: RemoteSGLangEngine, count: int) -> list[dict[str, torch.Tensor]]:
    rows = engine.wait(count, timeout=WAIT_S)
    assert all(row is not None for row in rows)
    return rows


def generated(*addresses: str) -> int:
    """Tokens that the servers at these addresses, or behind them, have generated."""
    infos = [call(address, "/get_server_info")[1] for address in addresses]
    servers = [s for i in infos for s in ([v["info"] for v in i["servers"].values()] if "servers" in i else [i])]
    return sum(s["internal_states"][0]["generated_tokens"] for s in servers)


def interrupt(
    engine: RemoteSGLangEngine, addresses: Sequence[str], meanwhile: Callable[[], None]
) -> list[dict[str, torch.Tensor]]:
    """Pause while four long rollouts run, do something, go on; the finished rows."""
    before = generated(*addresses)
    for i in range(4):
        engine.submit({"ids": [*PROMPT, 50 + i]}, workflow=Completion(500))
    wait_until(lambda: generated(*addresses) > before + 40, "rollouts under way")
    engine.pause()
    engine.pause_generation()
    assert all(call(address, "/get_server_info")[1]["paused"] for address in addresses)
    meanwhile()
    engine.continue_generation()
    engine.resume()
    return wait_for(engine, 4)
