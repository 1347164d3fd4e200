"""Train the bundled pair: a tiny target model, its drafter, and the tokenizer they share.

    python -m sdcpd.dev.train --stories stories.jsonl --out DIR [--seed 1]

The stories file holds one JSON object a line with `prompt` and `text`.  All records of a prompt
whose SHA-256 begins with a byte below `HELD_OUT_BYTE` are kept out of the training and serve to
measure; others show how the training goes.  The target learns the texts; the drafter
starts from the target's first and last layers and learns the target's own distribution, over the
stories and over texts that the target writes.
Needs the extra `train` (transformers).  The log of losses is written beside the models.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HELD_OUT_BYTE = 14  # of 256: about one prompt in eighteen
VALIDATION_BYTE = 22  # prompts from HELD_OUT_BYTE up to here show how the training goes
BEGIN, USER, ASSISTANT, END = "<|begin|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Size and schedule of one model of the pair."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    steps: int
    learning_rate: float
    dropout: float


TARGET = Shape(6, 192, 6, 3, 576, steps=1600, learning_rate=2.5e-3, dropout=0.0)
DRAFTER = Shape(2, 192, 6, 3, 576, steps=1200, learning_rate=1.5e-3, dropout=0.0)
VOCABULARY = 4096
WINDOW = 256
BATCH = 16
WEIGHT_DECAY = 0.1
MEASURED = 20  # held-out prompts that the report on the pair uses
WRITTEN = 1000  # documents whose beginnings the target goes on with, for the drafter to learn


class Log:
    """Prints a line with the elapsed time and keeps it in a file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begin = time.monotonic()

    def __call__(self, text: str) -> None:
        line = f"{time.monotonic() - self._begin:7.1f} s  {text}"
        print(line, flush=True)
        self._stream.write(line + "\n")
        self._stream.flush()


def _lot(record: dict[str, Any]) -> int:
    """A number from 0 to 255, by the hash of the prompt alone: no sibling leaks."""
    return hashlib.sha256(record["prompt"].encode()).digest()[0]


def held_out(record: dict[str, Any]) -> bool:
    """Whether a record serves to measure and is kept from the training."""
    return _lot(record) < HELD_OUT_BYTE


def validates(record: dict[str, Any]) -> bool:
    """Whether a record serves to watch the training."""
    return HELD_OUT_BYTE <= _lot(record) < VALIDATION_BYTE


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE, so that every text can be encoded and decoded exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[BEGIN, USER, ASSISTANT, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def documents(tokenizer: Tokenizer, records: list[dict[str, Any]]) -> list[list[int]]:
    """Each record as a chat turn and as plain text."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    begin, user, assistant, end = (tokenizer.token_to_id(t) for t in (BEGIN, USER, ASSISTANT, END))
    result = []
    for record in records:
        text = ids(record["text"]) + ([end] if record["complete"] else [])
        result.append([user, *ids(record["prompt"]), assistant, *text])
        result.append([begin, *text])
    return result


def windows(docs: list[list[int]], chooser: random.Random) -> Iterator[torch.Tensor]:
    """Endless batches [BATCH, WINDOW + 1] cut from the documents in a new order each epoch."""
    while True:
        order = docs[:]
        chooser.shuffle(order)
        stream = [token for doc in order for token in doc]
        offset = chooser.randrange(WINDOW)
        rows = [stream[i : i + WINDOW + 1] for i in range(offset, len(stream) - WINDOW - 1, WINDOW)]
        chooser.shuffle(rows)
        for i in range(0, len(rows) - BATCH + 1, BATCH):
            yield torch.tensor(rows[i : i + BATCH])


def build(shape: Shape, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A randomly initialised model of that shape, its embedding and head tied."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers if shape.dropout else ():
        # Llama has no dropout of its own; on what a layer adds it does most against rote.
        for part in (layer.self_attn.o_proj, layer.mlp):
            part.register_forward_hook(
                lambda module, _, out: F.dropout(out, shape.dropout, module.training)
            )
    return model


def optimiser(model: LlamaForCausalLM, shape: Shape) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}],
        lr=shape.learning_rate,
        betas=(0.9, 0.95),
    )


def learning_rate(step: int, shape: Shape) -> float:
    """Linear warm-up over 100 steps, then a cosine down to a twentieth."""
    if step < 100:
        return shape.learning_rate * (step + 1) / 100
    part = (step - 100) / max(1, shape.steps - 100)
    return shape.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * part)))


def descend(model: LlamaForCausalLM, opt: torch.optim.Optimizer, loss: Any, rate: float) -> None:
    """One optimiser step on a loss."""
    for group in opt.param_groups:
        group["lr"] = rate
    opt.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, docs: list[list[int]]) -> float:
    """Cross entropy a token over documents, each on its own."""
    model.eval()
    total, count = 0.0, 0
    for doc in docs:
        ids = torch.tensor([doc[:1024]])
        logits = model(ids[:, :-1]).logits
        total += float(F.cross_entropy(logits[0], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    model.train()
    return total / count


def train_target(
    tokenizer: Tokenizer, train: list[list[int]], check: list[list[int]], seed: int, log: Log
) -> LlamaForCausalLM:
    """Next-token training on the stories, past the best loss on `check`.

    Greedy text is what people see.  At the best loss it runs in circles; some steps later it
    follows the phrases of its stories, which do not.
    """
    model = build(TARGET, tokenizer)
    opt = optimiser(model, TARGET)
    log(f"target: {sum(p.numel() for p in model.parameters())} parameters")
    batches = windows(train, random.Random(seed))
    model.train()
    for step in range(TARGET.steps):
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1]).logits.flatten(0, 1)
        loss = F.cross_entropy(logits.float(), batch[:, 1:].flatten())
        descend(model, opt, loss, learning_rate(step, TARGET))
        last = step == TARGET.steps - 1
        if step % 100 == 0 or last:
            now = mean_loss(model, check)
            log(f"target step {step}/{TARGET.steps}: loss {loss.item():.4f}, check {now:.4f}")
    return model


@torch.no_grad()
def write_texts(
    model: LlamaForCausalLM, docs: list[list[int]], tokenizer: Tokenizer, log: Log
) -> list[list[int]]:
    """What the target itself writes after each beginning, greedily and by chance."""
    model.eval()
    assistant = tokenizer.token_to_id(ASSISTANT)
    end = tokenizer.token_to_id(END)
    beginnings: dict[int, list[list[int]]] = {}
    for doc in docs:
        cut = doc.index(assistant) + 1 if assistant in doc[:64] else min(8, len(doc) - 1)
        beginnings.setdefault(cut, []).append(doc[:cut])
    written = []
    for group in beginnings.values():
        for i in range(0, len(group), 96):
            batch = torch.tensor(group[i : i + 96])
            for sample in (False, True):
                out = model.generate(
                    batch,
                    attention_mask=torch.ones_like(batch),
                    max_new_tokens=160,
                    do_sample=sample,
                    temperature=0.8 if sample else None,
                    pad_token_id=end,
                    eos_token_id=end,
                )
                for row in out.tolist():
                    stop = row.index(end) + 1 if end in row else len(row)
                    written.append(row[:stop])
    log(f"the target wrote {len(written)} texts, {sum(map(len, written))} tokens")
    return written


def train_drafter(
    target: LlamaForCausalLM,
    tokenizer: Tokenizer,
    docs: list[list[int]],
    seed: int,
    log: Log,
) -> LlamaForCausalLM:
    """Distillation: the drafter learns the target's rows, its best token above all."""
    drafter = build(DRAFTER, tokenizer)
    drafter.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    drafter.model.layers[0].load_state_dict(target.model.layers[0].state_dict())
    drafter.model.layers[-1].load_state_dict(target.model.layers[-1].state_dict())
    drafter.model.norm.load_state_dict(target.model.norm.state_dict())
    log(f"drafter: {sum(p.numel() for p in drafter.parameters())} parameters")
    opt = optimiser(drafter, DRAFTER)
    batches = windows(docs, random.Random(seed + 1))
    drafter.train()
    target.eval()
    for step in range(DRAFTER.steps):
        batch = next(batches)[:, :-1]
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = target(batch).logits.flatten(0, 1).float()
            logits = drafter(batch).logits.flatten(0, 1)
        logits = logits.float()
        soft = F.kl_div(
            F.log_softmax(logits, -1), F.log_softmax(wanted, -1), log_target=True, reduction="sum"
        )
        best = wanted.argmax(-1)
        hard = F.cross_entropy(logits, best)
        loss = soft / len(logits) + 0.5 * hard
        descend(drafter, opt, loss, learning_rate(step, DRAFTER))
        if step % 50 == 0 or step == DRAFTER.steps - 1:
            agree = (logits.argmax(-1) == best).float().mean().item()
            log(f"drafter step {step}/{DRAFTER.steps}: loss {loss.item():.4f}, agree {agree:.3f}")
    return drafter


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """A Hugging Face directory in bf16: config, weights, tokenizer, chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    extra = {
        "bos_token": BEGIN,
        "eos_token": END,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(extra, indent=1) + "\n")
    (directory / "generation_config.json").unlink(missing_ok=True)


def write_held_out(records: list[dict[str, Any]], path: Path) -> None:
    """The first prompts that were held out, by which the pair is measured."""
    prompts = [r["prompt"] for r in records if held_out(r)][:MEASURED]
    path.write_text(json.dumps(prompts, indent=1) + "\n")


def main() -> None:
    """Train and save the pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--stories", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    records = [json.loads(line) for line in options.stories.open(encoding="utf-8")]
    with (options.out / "training.log").open("w") as stream:
        log = Log(stream)
        kept = [r for r in records if not held_out(r)]
        write_held_out(records, options.out / "held_out.json")
        tokenizer = train_tokenizer([r["prompt"] + "\n" + r["text"] for r in kept])
        train = documents(tokenizer, [r for r in kept if not validates(r)])
        check = documents(tokenizer, [r for r in kept if validates(r)])
        test = documents(tokenizer, [r for r in records if held_out(r)])
        log(f"{len(kept)} records to train on, {len(records) - len(kept)} held out")
        log(f"{sum(map(len, train))} tokens, {TARGET}, {DRAFTER}, seed {options.seed}")
        target = train_target(tokenizer, train, check, options.seed, log)
        log(f"target: held out {mean_loss(target, test):.4f} a token, {len(test)} documents")
        save(target, tokenizer, options.out / "target")
        target.float()
        begun = random.Random(options.seed).sample(train, min(WRITTEN, len(train)))
        written = write_texts(target, begun, tokenizer, log)
        drafter = train_drafter(target, tokenizer, train + written, options.seed, log)
        save(drafter, tokenizer, options.out / "drafter")
        log("saved")


if __name__ == "__main__":
    main()
