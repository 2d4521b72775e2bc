"""Make a drafter for a local model from its own answers to tau2 prompts: collect, train, measure.

    python -m experiments.drafter --model MODEL --out DRAFTER --work WORK

Everything under way is kept in WORK (default: DRAFTER with .work behind it), and the same command goes on where an
earlier one was stopped: answers that are there are not asked for again, training continues after its last saved step.
``--steps collect`` and ``--steps train`` do one part only. WORK/report.json says what came of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from areal_dta.drafter.eagle_config import KINDS
from areal_dta.drafter.eagle_files import read_drafter
from areal_dta.nn import DecoderConfig, DecoderWeights, load_decoder
from experiments.drafter.collect import CollectSettings, collect
from experiments.drafter.prompts import VARIANTS, Prompt, make_prompts, split_tasks
from experiments.drafter.samples import load_samples
from experiments.drafter.train import DRAFT_VOCAB, TrainSettings, train
from experiments.tau2.chat import load_tokenizer
from experiments.tau2.domains import DOMAINS

__all__ = ["main"]

SIDES = ("train", "held_out")
EXAMPLES = """examples:
  python -m experiments.drafter --model MODEL --out DRAFTER
      a drafter for embedded servers; stopped, the same command goes on
  python -m experiments.drafter --model MODEL --out DRAFTER --portable
      one that SGLang's EAGLE classes can load as well, see docs/speculation.md
  python -m experiments.drafter --model MODEL --out DRAFTER --kind eagle3 --portable --work WORK
      an EAGLE-3 one; with the same WORK from the same answers
  python -m experiments.drafter --model MODEL --out BETTER --start DRAFTER --work WORK --response-tokens 300000
      more answers, and DRAFTER trained further on all of them
"""
_BEGAN_S = time.monotonic()


def _parser() -> argparse.ArgumentParser:
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="python -m experiments.drafter",
        description=__doc__.splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a local Hugging Face folder")
    add("--out", type=Path, required=True, help="the drafter's folder, written again whenever the state is saved")
    add("--work", type=Path, help="answers and training state; default: OUT.work")
    add("--steps", choices=["collect", "train", "all"], default="all", help="one part only")
    add("--start", type=Path, help="a drafter's folder to go on from, for example after collecting more")
    add("--kind", choices=KINDS, default=TrainSettings.kind)
    add("--draft-vocab", type=int, help=f"tokens that can be drafted, 0: all; default: {DRAFT_VOCAB}, or as --start")
    add("--portable", action="store_true", help="leave out what SGLang's EAGLE classes cannot load (q/k-norm, biases)")
    add("--domains", default=",".join(DOMAINS), help="tau2 domains of the prompts")
    add("--max-prompt", type=int, default=1024, help="bound of the prompts' tokens; 0: whole prompts (5,000 to 8,000)")
    add(
        "--response-tokens",
        type=int,
        default=CollectSettings.response_tokens,
        help="to collect; a tenth more is held out",
    )
    add("--max-new-tokens", type=int, default=CollectSettings.max_new_tokens)
    add("--batch", type=int, default=CollectSettings.batch, help="requests at once while collecting")
    add("--epochs", type=int, default=TrainSettings.epochs)
    add("--learning-rate", type=float, default=TrainSettings.learning_rate)
    add("--batch-tokens", type=int, default=TrainSettings.batch_tokens)
    add("--context", type=int, default=TrainSettings.context, help="prompt tokens before an answer while training")
    add("--answers-only", action="store_true", help="do not learn from the prompts' own tokens")
    add("--seconds", type=float, default=1e9, help="limit for each part of this call")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    return parser


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _BEGAN_S:6.0f} s] {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when the drafter is there, 1 with the reason on standard error."""
    args = _parser().parse_args(arguments)
    args.work = args.work or args.out.with_name(f"{args.out.name}.work")
    torch.set_num_threads(args.threads)
    try:
        _run(args)
    except (ValueError, OSError) as error:  # no model, no tokenizer, an unknown domain, no room, no samples
        print(f"experiments.drafter: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    target = load_decoder(args.model, DecoderConfig.from_folder(args.model), torch.float32)
    split, tokenizer = split_tasks(args.domains.split(","), args.seed), load_tokenizer(str(args.model))
    prompts = {
        side: [make_prompts(tokenizer, getattr(split, side), args.max_prompt, v) for v in range(VARIANTS)]
        for side in SIDES
    }
    _say(f"{len(split.train)} tasks to train on, {len(split.held_out)} held out")
    if args.steps != "train":
        for side, share in (("held_out", 0.1), ("train", 1.0)):
            settings = CollectSettings(
                response_tokens=int(share * args.response_tokens),
                batch=args.batch,
                max_new_tokens=args.max_new_tokens,
                seconds=share * args.seconds,
                seed=args.seed + SIDES.index(side),
            )
            found = collect(target, args.model.name, args.work / side, prompts[side], settings, _say)
            _say(f"{side}: {found.response_tokens} response tokens in {found.num_requests} answers")
    if args.steps != "collect":
        _train(args, target, {side: [p for group in prompts[side] for p in group] for side in SIDES})


def _train(args: argparse.Namespace, target: DecoderWeights, prompts: dict[str, list[Prompt]]) -> None:
    samples, held_out = (
        load_samples(
            args.work / side,
            args.kind,
            prompts[side],
            args.context,
            learn_prompts=side == "train" and not args.answers_only,
        )
        for side in SIDES
    )
    settings = TrainSettings(
        kind=args.kind,
        draft_vocab=args.draft_vocab,
        portable=args.portable,
        epochs=args.epochs,
        batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate,
        context=args.context,
        seconds=args.seconds,
        seed=args.seed,
    )
    start = read_drafter(args.start, target)[0] if args.start else None
    trained = train(target, samples, held_out, args.out, args.work / args.kind, settings, _say, start)
    (args.work / "report.json").write_text(json.dumps(trained.to_json(), indent=1) + "\n")
    shares = ", ".join(f"{share:.2f}" for share in trained.acceptance.by_position)
    _say(
        f"{args.out}: {trained.epochs:.1f} epochs in {trained.seconds:.0f} s; held-out top-1 "
        f"{trained.acceptance.top1:.3f}, top-3 {trained.acceptance.top3:.3f}, accept length "
        f"{trained.acceptance.accept_length:.2f} of chains ({shares} by position); the draft vocabulary covers "
        f"{trained.covered:.3f} of the answers"
    )


if __name__ == "__main__":
    sys.exit(main())
