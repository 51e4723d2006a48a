#!/usr/bin/env python3
"""Write what Hugging Face `generate` says to 20 prompts, for the tests to compare with.

    .venv/bin/python scripts/make_reference.py

Greedy, float32, one prompt at a time, 64 new tokens. With each token goes its margin: the distance of
its logit from the runner-up's. Two correct implementations may differ where it is next to nothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

REPO_ROOT = Path(__file__).resolve().parents[1]
MODEL_DIR = REPO_ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
OUTPUT = REPO_ROOT / "test" / "srt" / "data" / "hf_greedy.json"
NEW_TOKENS = 64

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees because",
    "The three primary colors are",
    "In 1969, the first humans",
    "A good night's sleep is important. It",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "The difference between a list and a tuple in Python is",
    "1, 1, 2, 3, 5, 8, 13,",
    "Photosynthesis is the process by which",
]
QUESTIONS = [
    "What is gravity?",
    "Give me three tips for learning a language.",
    "Write a haiku about rain.",
    "How do I boil an egg?",
    "Explain recursion to a child.",
    "What is the largest planet in the solar system?",
    "Translate 'good morning' into Spanish and German.",
    "Summarize the plot of Romeo and Juliet in two sentences.",
]


def main() -> None:
    """Generate and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False).input_ids)

    cases = []
    for ids in tqdm(prompts, desc="generate", unit="prompt"):
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )
        best = [step[0].topk(2).values for step in out.logits]
        cases.append(
            {
                "input_ids": ids,
                "output_ids": out.sequences[0, len(ids) :].tolist(),
                "margins": [round(float(top[0] - top[1]), 5) for top in best],
            }
        )
    header = {
        "made_by": "scripts/make_reference.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    lines = ",\n".join(json.dumps(case) for case in cases)
    head = json.dumps(header)[1:-1]
    args.output.write_text(f'{{{head}, "cases": [\n{lines}\n]}}\n')
    print(f"{len(cases)} cases in {args.output}")


if __name__ == "__main__":
    main()
