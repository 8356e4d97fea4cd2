"""A tokenizer with one token per byte: what needs a tokenizer and no particular model's."""

from __future__ import annotations

from typing import Any

__all__ = ["byte_tokenizer"]

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """256 bytes, BOS, and special tokens of a plain chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocabulary = {
        token: number for number, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]
    )
    build: Any = PreTrainedTokenizerFast  # transformers leaves it untyped
    return build(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=special[2:],
        chat_template=_CHAT_TEMPLATE,
    )
