"""lm-eval against the API: a task of multiple choice, scored by the log probabilities of prompts.

Each wrong choice has the words of the right one in another order, so that neither length nor rare
words give the answer away.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.dev import PAIR, Dev

TASK = "tiny_order"
CHANCE, ENOUGH = 0.25, 0.8
STORIES = (
    ("Once upon a time, there was a", "little girl who lived in a small house"),
    ("The sun was shining and the", "birds were singing in the trees"),
    ("She opened the door and saw", "a small dog with a big smile"),
    ("The old man walked slowly to", "the top of the hill"),
    ("It is important to drink", "enough water every day to stay healthy"),
    ("The ocean is home to", "many different kinds of fish"),
    ("To learn a new language, you", "need to practice a little every day"),
    ("The children played in the park", "until the sun went down"),
    ("In the middle of the forest", "there was a small wooden house"),
    ("The teacher asked the students", "to write a story about their family"),
    ("He looked up at the sky and", "saw the stars for the first time"),
    ("A good breakfast can help you", "feel full of energy in the morning"),
    ("The dragon was not angry, but", "it was afraid of the people"),
    ("They worked together as a team", "and found a way to help"),
    ("One of the best ways to save money is", "to make a plan and stick to it"),
    ("The moon moves around", "the earth about once every month"),
)


def documents() -> list[dict[str, Any]]:
    """The right choice is in turn the first, the second and so on."""
    made = []
    for number, (context, right) in enumerate(STORIES):
        words = right.split()
        odd_first = words[1::2] + words[::2]
        wrong = [words[::-1], odd_first, odd_first[::-1]]
        choices = [" ".join(one) for one in wrong]
        choices.insert(number % 4, right)
        made.append({"context": context, "choices": choices, "answer": number % 4})
    return made


def write_task(directory: Path) -> None:
    """The task's two files."""
    directory.mkdir()
    data = directory / "documents.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents()))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    (directory / f"{TASK}.yaml").write_text(json.dumps(task))  # which is YAML too


def evaluate(api: str, scratch: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Results and samples of the command."""
    model = {
        "model": "tiny",
        "base_url": f"{api}/completions",
        "tokenizer": str(PAIR / "target"),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_retries": 1,
    }
    write_task(scratch / "task")
    words = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args"]
    words += [",".join(f"{name}={value}" for name, value in model.items())]
    words += ["--include_path", str(scratch / "task"), "--tasks", TASK, "--log_samples"]
    words += ["--output_path", str(scratch / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = (scratch / "out").rglob("results_*.json")
    (samples,) = (scratch / "out").rglob("samples_*.jsonl")
    lines = samples.read_text().splitlines()
    return json.loads(results.read_text()), [json.loads(line) for line in lines]


def own_scores(document: dict[str, Any]) -> list[float]:
    """The same log probabilities from the weights themselves, by other code than ours.

    lm-eval puts no token before the first word unless it is told to.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)

    def encode(text: str) -> torch.Tensor:
        return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids

    start = encode(document["context"]).shape[1]
    scores = []
    for choice in document["choices"]:
        ids = encode(f"{document['context']} {choice}")
        with torch.no_grad():
            rows = model(ids).logits[0, :-1].log_softmax(-1)
        found = rows.gather(1, ids[0, 1:, None])[:, 0]
        scores.append(float(found[start - 1 :].sum()))
    return scores


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_bundled_model_knows_the_order_of_words(cluster: Dev, tmp_path: Path) -> None:
    results, samples = evaluate(cluster.api, tmp_path)
    assert len(samples) == len(STORIES)
    assert results["results"][TASK]["acc,none"] >= ENOUGH > CHANCE
    sample = samples[0]
    found = [float(answer[0]) for answer in sample["filtered_resps"]]
    assert found == pytest.approx(own_scores(sample["doc"]), abs=0.02)
