"""A small deterministic tokenizer: common words and bytes, no training, no files."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kveval.words import ADJECTIVES, NOUNS

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WORDS = """
    the a of in and to it is are all you be will which what for from one special magic number numbers text
    above following some hidden remember them asked about leads passkey passkeys each next start follow
    steps step pass do here question answer variables variable hold value that handed on another first
    track example over under with grass sky sun shines grows green blue yellow hangs hills road day go
    again out we walk home come VAR Text Some One The In Here Question Answer What Which Start Example
"""


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE, *, bos: bool = True) -> Any:
    """Byte-level; a word of the list is one token, all else is spelled in bytes."""
    special = ["<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"]
    words = dict.fromkeys([*WORDS.split(), *ADJECTIVES, *NOUNS])
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [form for word in words for form in (word, "Ġ" + word) if len(form) > 1]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=chat_template,
    )
