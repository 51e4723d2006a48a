#!/usr/bin/env python3
"""Train the EAGLE draft head of SmolLM2-135M-Instruct on the CPU, from the target's own text.

1. ``generate``: the target answers the prompts of ``eagle_prompts.py`` through this project's engine,
   half of them greedily and half at temperature 0.8, and reads its own features of the text.
2. ``train``: a fixed number of steps from a fixed seed, so that the same text gives the same weights
   twice. Writes a checkpoint that ``speculative_draft_model_path`` takes.
3. ``evaluate``: accepted length on held-out prompts, through the engine with speculation.

``all`` does one after the other. Text and features are kept in ``.cache/eagle``; a stage that was
stopped goes on where it was. Choices are made on the prompts of ``validation``; those of ``test`` are
for the figures that are reported, and for nothing else.

Examples
--------
::

    python scripts/train_eagle_head.py all
    python scripts/train_eagle_head.py generate --sequences 256
    python scripts/train_eagle_head.py train --sequences 256 --steps 60 --output /tmp/head
    python scripts/train_eagle_head.py evaluate --split validation --draft /tmp/head
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from eagle_head.data import FeatureReader, Sequence, TextSettings, TextWriter, digest_of_text
from eagle_head.data import model_digest as digest_of_model
from eagle_head.evaluation import CHAINS, TREES, Measured, measure, simulate, table
from eagle_head.model import DraftHead
from eagle_head.training import TrainSettings, choose_draft_vocab, train
from eagle_prompts import SPLITS, prompts_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.model_loader import read_safetensors

REPO_ROOT: Final = Path(__file__).resolve().parent.parent
MODEL: Final = REPO_ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
CACHE: Final = REPO_ROOT / ".cache" / "eagle"
ASSET: Final = REPO_ROOT / "assets" / "eagle-smollm2-135m"

SEQUENCES: Final = 1408
# Options that another head comes of.
MAKES_THE_HEAD: Final = (
    *("max_new_tokens", "sequences", "text_dtype", "text_batch_size", "temperature"),
    *("steps", "batch_size", "draft_vocab_size", "learning_rate", "seed"),
)
# What the committed head may weigh.
MAX_BYTES: Final = 10_000_000

# What a draft model's config.json takes over from its target's.
_SHARED_FIELDS: Final = (
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
)


def say(message: str) -> None:
    """Print one line of progress at once, also into a pipe."""
    print(f"train_eagle_head: {message}", flush=True)


def text_paths(args: argparse.Namespace, split: str, count: int) -> list[Path]:
    """Chunks of the target's text, made where they are missing."""
    settings = TextSettings(
        digest_of_model(args.model),
        dtype=args.text_dtype,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.text_batch_size,
        temperature=args.temperature,
    )
    return TextWriter(args.model, args.cache, settings).write(split, count)


def generate(args: argparse.Namespace) -> tuple[list[Sequence], list[Sequence], str]:
    """Text and features of what to train on and of what to choose by; the text's digest."""
    train_paths = text_paths(args, "train", args.sequences)
    validation_paths = text_paths(args, "validation", len(prompts_of("validation")))
    reader = FeatureReader(args.model)
    sequences = reader.read(train_paths, "train")
    validation = reader.read(validation_paths, "validation")
    written = sum(len(s.ids) - s.prompt_len for s in sequences)
    digest = digest_of_text(train_paths)
    say(f"{len(sequences)} sequences, {written} tokens by the target, text {digest[:16]}")
    return sequences, validation, digest


def load_embed_and_head(model: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embedding and head, (vocab_size, hidden_size) float32."""
    tensors = dict(read_safetensors(model))
    embedding = tensors["model.embed_tokens.weight"].float()
    head = tensors.get("lm_head.weight")
    return embedding, embedding if head is None else head.float()


def train_head(args: argparse.Namespace) -> None:
    """Train on the cached text, and write the checkpoint."""
    sequences, validation, digest = generate(args)
    config = ModelConfig.from_path(args.model)
    settings = TrainSettings(
        steps=args.steps,
        batch_size=args.batch_size,
        draft_vocab_size=args.draft_vocab_size,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    embedding, lm_head = load_embed_and_head(args.model)
    hot = choose_draft_vocab(sequences, config.vocab_size, settings.draft_vocab_size)
    rows = lm_head[hot].clone()
    answers = torch.cat([s.ids[s.prompt_len :] for s in validation])
    say(
        f"draft vocabulary of {len(hot)} covers "
        f"{torch.isin(answers, hot).float().mean():.1%} of the validation text"
    )

    def look(step: int, head: DraftHead) -> str:
        return str(simulate(head, validation, embedding, rows, hot))

    start = time.monotonic()
    head = train(config, sequences, embedding, rows, settings, look, args.look_every)
    say(f"trained {settings.steps} steps in {time.monotonic() - start:.0f} s: {look(-1, head)}")
    made_from = {"train": dataclasses.asdict(settings), "text": digest, "sequences": len(sequences)}
    write_checkpoint(args.output, args.model, head, hot, made_from)
    say(f"wrote {args.output}")


def write_checkpoint(
    output: Path,
    model: Path,
    head: DraftHead,
    hot_token_id: torch.Tensor,
    made_from: dict[str, Any],
) -> None:
    """Write config.json and model.safetensors (float16).

    Raises
    ------
    ValueError
        If the weights take more than `MAX_BYTES`.
    """
    # One order of draft ids, whatever the counts: neighbours in the target stay neighbours.
    tensors = {name: p.detach().half().contiguous() for name, p in head.state_dict().items()}
    tensors["hot_token_id"] = hot_token_id.sort().values.to(torch.int32)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size > MAX_BYTES:
        raise ValueError(f"the head takes {size} bytes, at most {MAX_BYTES} are allowed")
    target = json.loads((model / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        "draft_vocab_size": len(hot_token_id),
        "dtype": "float16",
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    }
    config |= {name: target[name] for name in _SHARED_FIELDS if name in target}
    output.mkdir(parents=True, exist_ok=True)
    # One entry only: safetensors writes several in an order of its own at each call.
    metadata = {"made_from": json.dumps(made_from, sort_keys=True)}
    save_file(tensors, output / "model.safetensors", metadata=metadata)
    (output / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def evaluate(args: argparse.Namespace) -> list[Measured]:
    """Measure chains and trees through the engine, and print a table."""
    results = []
    for shape in CHAINS + TREES:
        if args.only_steps is not None and shape.num_steps not in args.only_steps:
            continue
        result = measure(
            args.model, args.draft, args.split, shape, args.max_new_tokens, args.eval_batch_size
        )
        results.append(result)
        say(f"{shape}: {result.accept_length:.3f}")
    print(table(results))
    if args.json is not None:
        args.json.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=2) + "\n")
    return results


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    if not (args.model / "config.json").is_file():
        print(f"train_eagle_head: error: no model at {args.model}: make model", file=sys.stderr)
        return 1
    start = time.monotonic()
    try:
        if args.command == "generate":
            generate(args)
        if args.command in ("train", "all"):
            train_head(args)
        if args.command in ("evaluate", "all"):
            evaluate(args)
    except (ValueError, OSError) as error:
        print(f"train_eagle_head: error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("train_eagle_head: interrupted; what is in the cache is whole", file=sys.stderr)
        return 130
    say(f"{args.command} took {time.monotonic() - start:.0f} s")
    return 0


def positive(text: str) -> int:
    """A positive integer of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="train_eagle_head.py", description=summary)
    commands = parser.add_subparsers(dest="command", required=True, metavar="STAGE")
    for name, text in (
        ("generate", "let the target write, and read its features"),
        ("train", "train the head (and generate what is missing)"),
        ("evaluate", "measure accepted lengths through the engine"),
        ("all", "train, then evaluate on the test prompts"),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        _add_common(command)
        if name != "evaluate":
            _add_generate(command)
        if name in ("train", "all"):
            _add_train(command)
        if name in ("evaluate", "all"):
            _add_evaluate(command)
    args = parser.parse_args(argv)
    if args.command in ("train", "all") and args.output is None:
        usual = parser.parse_args([args.command, "--output", str(ASSET)])
        if any(getattr(args, name) != getattr(usual, name) for name in MAKES_THE_HEAD):
            parser.error("--output is required for other settings than the committed head's")
        args.output = ASSET
    if args.command == "all":
        args.draft = args.output
    return args


def _add_common(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", type=Path, default=MODEL, help="directory of the target")
    add("--threads", type=positive, default=2, help="threads of torch")
    add("--max-new-tokens", type=positive, default=128, help="longest answer, in tokens")


def _add_generate(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--cache", type=Path, default=CACHE, help="where text and features are kept")
    add("--sequences", type=positive, default=SEQUENCES, help="sequences to train on")
    add("--text-dtype", default="bfloat16", help="what the target computes in while it writes")
    add("--text-batch-size", type=positive, default=64, help="sequences written at a time")
    add("--temperature", type=float, default=0.8, help="of every second sequence")


def _add_train(command: argparse.ArgumentParser) -> None:
    default = TrainSettings()
    add = command.add_argument
    add(
        "--output",
        type=Path,
        help="directory of the checkpoint; the committed one if nothing else is asked for",
    )
    add("--steps", type=positive, default=default.steps, help="steps of the optimizer")
    add("--batch-size", type=positive, default=default.batch_size, help="sequences of a step")
    add("--draft-vocab-size", type=positive, default=default.draft_vocab_size, help="tokens")
    add("--learning-rate", type=float, default=default.learning_rate, help="highest rate")
    add("--seed", type=int, default=default.seed, help="of all that is random")
    add("--look-every", type=positive, default=100, help="steps between looks at validation")


def _add_evaluate(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    if command.prog.endswith(" evaluate"):
        add("--draft", type=Path, default=ASSET, help="directory of the head")
    add("--split", choices=SPLITS[1:], default="test", help="which held-out prompts")
    add("--eval-batch-size", type=positive, default=16, help="requests that run at a time")
    add("--only-steps", type=positive, nargs="+", default=None, help="only trees of these depths")
    add("--json", type=Path, default=None, help="file for the figures")


if __name__ == "__main__":
    sys.exit(main())
