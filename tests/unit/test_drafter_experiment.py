"""A drafter from a model's own answers to tau2 prompts: the split, bounded prompts, collecting and training that go on
where they were stopped.

Not covered: whether a drafter gets good (that takes a real model and minutes; `bench.py spec` measures it).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from areal_dta.drafter.eagle import trained_tensors
from areal_dta.drafter.eagle_config import sglang_obstacles
from areal_dta.drafter.eagle_files import read_drafter
from areal_dta.nn import DecoderConfig, load_decoder
from experiments.drafter.__main__ import main
from experiments.drafter.prompts import Prompt, PromptError, make_prompts, split_tasks
from experiments.drafter.samples import NoSamples, load_samples
from experiments.tau2.chat import load_tokenizer
from experiments.tau2.domains import get_task
from experiments.tau2.policy import PolicySize, write_policy
from experiments.tau2.tokenizer import build_tokenizer
from experiments.tau2.user import script_of

HIDDEN = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(folder, vocab_size=1024)
    size = PolicySize(HIDDEN, 96, 3, 4, 2, 16)
    ids = {"eos_id": tokenizer.eos_token_id, "pad_id": tokenizer.pad_token_id}
    write_policy(folder, vocab_size=len(tokenizer), seed=0, size=size, **ids)
    return folder


@pytest.fixture(scope="module")
def work(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers collected in two calls."""
    folder = tmp_path_factory.mktemp("work")
    options = ["--steps", "collect", "--seconds", "0"]
    assert main(arguments(model, folder, *options)) == 0
    assert not (folder / "train" / "requests.jsonl").read_text()
    assert main(arguments(model, folder, "--steps", "collect")) == 0
    return folder


def arguments(model: Path, work: Path, *more: str) -> list[str]:
    fixed = ["--domains", "mock", "--response-tokens", "150", "--max-new-tokens", "12", "--batch", "6"]
    fixed += ["--draft-vocab", "256", "--epochs", "2", "--batch-tokens", "300", "--context", "32"]
    return ["--model", str(model), "--out", str(work / "drafter"), "--work", str(work), *fixed, *more]


def all_prompts(model: Path, side: str) -> list[Prompt]:
    tokenizer, split = load_tokenizer(str(model)), split_tasks(["mock"])
    return [p for v in range(3) for p in make_prompts(tokenizer, getattr(split, side), 1024, v)]


def test_no_task_and_no_text_is_on_both_sides() -> None:
    split = split_tasks()
    assert not set(split.train) & set(split.held_out)
    assert {domain for domain, _ in split.held_out} == {"airline", "retail", "telecom", "mock"}
    requests = [{script_of(get_task(*task)).request for task in side} for side in (split.train, split.held_out)]
    assert not requests[0] & requests[1]


def test_bounded_prompts_keep_the_policys_ends_and_share_what_comes_before_the_request(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    tasks = split_tasks(["airline"]).train[:4]
    whole, bounded = (make_prompts(tokenizer, tasks, bound) for bound in (0, 1400))
    assert max(len(p.ids) for p in bounded) <= 1400 < min(len(p.ids) for p in whole)
    text = tokenizer.decode(bounded[0].ids)
    assert "# Airline Agent Policy" in text
    assert "[...]" in text
    assert "Do not offer compensation for any other reason" in text
    assert "get_user_details(user_id)" in text
    num_shared = next(i for i, tokens in enumerate(zip(*(p.ids for p in bounded))) if len(set(tokens)) > 1)
    assert num_shared > 1400 - 250
    with pytest.raises(PromptError, match="--max-prompt"):
        make_prompts(tokenizer, tasks, 300)


def test_every_answer_gets_the_features_of_its_whole_prompt_back(model: Path, work: Path) -> None:
    prompts = all_prompts(model, "train")
    samples = load_samples(work / "train", "eagle", prompts, context=4096)
    assert {tuple(s.ids_T[: s.loss_start + 1].tolist()) for s in samples} <= {p.ids for p in prompts}
    short = load_samples(work / "train", "eagle3", prompts, context=8)
    assert {s.loss_start for s in short} == {8}
    assert short[0].features_TF.shape[1] == 3 * HIDDEN
    assert short[0].hidden_TD is not None
    torch.testing.assert_close(short[0].hidden_TD, samples[0].features_TF[-short[0].num_tokens :])
    learning = load_samples(work / "train", "eagle", prompts, context=8, learn_prompts=True)
    positions = [sum(s.loss_end - s.loss_start for s in x) for x in (samples, learning)]
    assert positions[1] > positions[0] + 300  # a system message and the requests


def test_training_goes_on_where_it_was_stopped(model: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(model, work, "--steps", "train", "--seconds", "0")) == 0
    assert json.loads((work / "report.json").read_text())["num_steps"] == 1
    assert main(arguments(model, work, "--steps", "train")) == 0
    assert "going on after step 1 of" in capsys.readouterr().out
    report = json.loads((work / "report.json").read_text())
    assert report["complete"]
    assert report["epochs"] == 2
    assert report["acceptance"]["accept_length"] == pytest.approx(1 + sum(report["acceptance"]["by_position"]))
    target = load_decoder(model, DecoderConfig.from_folder(model), torch.float32)
    weights, manifest = read_drafter(work / "drafter", target)
    assert weights.config.draft_vocab_size == 256
    assert set(target.config.eos_token_ids) <= set(weights.draft_ids_Vd.tolist())
    assert manifest.weight_version == f"eagle-{report['num_steps']}"


def test_an_eagle_drafter_goes_on_as_hass_but_not_as_eagle3(model: Path, work: Path, tmp_path: Path) -> None:
    first = ["--steps", "train", "--seconds", "0", "--work", str(work)]
    out = tmp_path / "first"
    assert main([*arguments(model, work, *first), "--out", str(out)]) == 0
    more = [*first, "--start", str(out), "--out", str(tmp_path / "second")]
    assert main(arguments(model, work, *more, "--kind", "hass")) == 0
    target = load_decoder(model, DecoderConfig.from_folder(model), torch.float32)
    assert read_drafter(tmp_path / "second", target)[0].config.kind == "hass"
    assert main(arguments(model, work, *more, "--kind", "eagle3")) == 1


def test_a_drafter_that_goes_on_may_get_another_vocabulary_unless_its_head_is_trained(
    model: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_decoder(model, DecoderConfig.from_folder(model), torch.float32)
    options = ["--steps", "train", "--seconds", "0"]
    assert main([*arguments(model, work, *options), "--out", str(tmp_path / "first")]) == 0
    recut = [*options, "--start", str(tmp_path / "first"), "--epochs", "0", "--draft-vocab", "100"]
    assert main([*arguments(model, work, *recut), "--out", str(tmp_path / "recut")]) == 0
    first, second = (read_drafter(tmp_path / name, target)[0] for name in ("first", "recut"))
    assert (first.config.draft_vocab_size, second.config.draft_vocab_size) == (256, 100)
    assert first.draft_ids_Vd is not None and second.draft_ids_Vd is not None
    assert set(second.draft_ids_Vd.tolist()) < set(first.draft_ids_Vd.tolist())
    assert all(torch.equal(trained_tensors(second)[name], t) for name, t in trained_tensors(first).items())
    own_head = [*options, "--kind", "eagle3", "--out", str(tmp_path / "eagle3")]
    assert main(arguments(model, work, *own_head)) == 0
    more = [*own_head, "--start", str(tmp_path / "eagle3"), "--draft-vocab", "100"]
    assert main(arguments(model, work, *more)) == 1
    assert "trained head of 256 tokens, not 100; leave out --draft-vocab" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "asked", "kept"), [("eagle", 8192, 0), ("hass", 256, 256), ("eagle3", 256, 256)])
def test_a_portable_drafter_has_what_sglang_can_load_although_its_target_has_q_k_norms(
    kind: str, asked: int, kept: int, model: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_decoder(model, DecoderConfig.from_folder(model), torch.float32)
    assert target.config.qk_norm
    own, portable = tmp_path / "own", tmp_path / "portable"
    options = ["--steps", "train", "--seconds", "0", "--kind", kind, "--draft-vocab", str(asked)]
    assert main([*arguments(model, work, *options), "--out", str(own)]) == 0
    assert sglang_obstacles(read_drafter(own, target)[0].config) == ("q/k-norm",)
    options.append("--portable")
    assert main([*arguments(model, work, *options), "--out", str(portable)]) == 0
    assert "of other settings or other samples: starting anew" in capsys.readouterr().out
    config = read_drafter(portable, target)[0].config
    assert (config.kind, config.draft_vocab_size, sglang_obstacles(config)) == (kind, kept, ())
    architecture = "LlamaForCausalLMEagle3" if kind == "eagle3" else "LlamaForCausalLMEagle"
    assert json.loads((portable / "config.json").read_text())["architectures"] == [architecture]
    capsys.readouterr()
    assert main([*arguments(model, work, *options), "--out", str(portable)]) == 0
    assert "going on after step 1 of" in capsys.readouterr().out
    assert main([*arguments(model, work, *options), "--start", str(own), "--out", str(portable)]) == 1
    assert "q/k-norm, so it cannot go on as a portable one; leave out --start" in capsys.readouterr().err
    options.remove("--portable")
    more = ["--start", str(portable), "--out", str(own), "--work", str(work)]
    assert main([*arguments(model, work, *options), *more]) == 0  # stays what it is
    assert not sglang_obstacles(read_drafter(own, target)[0].config)


def test_nothing_to_train_on_is_an_error_that_says_so(model: Path, tmp_path: Path) -> None:
    assert main(arguments(model, tmp_path, "--steps", "train")) == 1
    with pytest.raises(NoSamples, match="collect some first"):
        load_samples(tmp_path, "eagle", [], 8)
