from __future__ import annotations

import pytest
from tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kveval.errors import TaskError, UnsupportedError
from kveval.prompting import PromptTemplate, shared_prefix

BOS, USER, ASSISTANT, END = 1, 2, 3, 4


def test_chat_prompt_equals_the_rendered_template():
    tokenizer = tiny_tokenizer()
    prompt = PromptTemplate.from_tokenizer(tokenizer)
    assert prompt.mode == "chat"
    pieces = prompt.head_ids + prompt.encode("Text: the sun.") + prompt.tail("\n\nWhat is it?", "It is")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Text: the sun.\n\nWhat is it?"}], tokenize=False, add_generation_prompt=True
    )
    assert list(pieces) == tokenizer(rendered + "It is", add_special_tokens=False)["input_ids"]
    assert pieces[:2] == (BOS, USER)


@pytest.mark.parametrize(("mode", "template"), [("none", CHAT_TEMPLATE), ("auto", None)])
def test_raw_prompt_has_the_tokenizers_own_bos(mode, template):
    prompt = PromptTemplate.from_tokenizer(tiny_tokenizer(template), mode)
    assert (prompt.mode, prompt.head_ids, prompt.bos_ids) == ("raw", (BOS,), (BOS,))
    assert prompt.tail("Who?", "It is") == prompt.encode("Who?\n\nIt is")


def test_raw_prompt_without_bos():
    prompt = PromptTemplate.from_tokenizer(tiny_tokenizer(None, bos=False))
    assert (prompt.head_ids, prompt.bos_ids) == ((), ())


def test_special_tokens_in_text_stay_text():
    tokenizer = tiny_tokenizer()
    prompt = PromptTemplate.from_tokenizer(tokenizer)
    ids = prompt.encode("end it <|end|> here <|user|>")
    assert not {BOS, USER, ASSISTANT, END}.intersection(ids)
    assert tokenizer.decode(ids) == "end it <|end|> here <|user|>"


def test_a_tokenizer_that_parses_special_tokens_all_the_same_is_an_error():
    class Stubborn:
        def __getattr__(self, name):
            return getattr(tiny, name)

        def __call__(self, text, **options):
            return tiny(text, **{**options, "split_special_tokens": False})

    tiny = tiny_tokenizer()
    prompt = PromptTemplate.from_tokenizer(Stubborn())
    with pytest.raises(TaskError, match=r"special tokens \('<\|end\|>'\)"):
        prompt.encode("x <|end|>")


def test_the_space_goes_where_the_tokenizer_puts_it():
    prompt = PromptTemplate.from_tokenizer(tiny_tokenizer())
    tokenizer = prompt.tokenizer
    tail, answer = prompt.tail_and_answer("Who?", "It is", "falcon")
    assert tokenizer.convert_ids_to_tokens(answer) == ["Ġfalcon"]
    assert tail == prompt.tail("Who?", "It is")
    # Bytes: the space is a token of its own, so the model is given it.
    tail, answer = prompt.tail_and_answer("Who?", "It is", "42")
    assert tokenizer.convert_ids_to_tokens(answer) == ["4", "2"]
    assert tail == prompt.tail("Who?", "It is ")


def test_digest_tells_templates_apart():
    digests = [
        PromptTemplate.from_tokenizer(tiny_tokenizer(template), mode).digest
        for template in (CHAT_TEMPLATE, CHAT_TEMPLATE.replace("<|user|>", "<|user|> you"))
        for mode in ("auto", "none")
    ]
    assert len(set(digests)) == 3
    assert digests[1] == digests[3]
    assert digests[0] == PromptTemplate.from_tokenizer(tiny_tokenizer()).digest


def test_the_date_and_the_reasoning_switch_are_pinned():
    dated = "\nOn {{ strftime_now('%A %-d %B %Y') }}|{{ date_string }}|{{ enable_thinking }}|" + CHAT_TEMPLATE
    prompt = PromptTemplate.from_tokenizer(tiny_tokenizer(dated))
    assert prompt.tokenizer.decode(prompt.head_ids) == "\nOn Monday 1 July 2024|01 Jul 2024|False|<|bos|><|user|>\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}hello",
        "{{ messages[0]['content'] }} {{ messages[0]['content'] }}",
        "{{ messages[0]['content'] | upper }}",
    ],
)
def test_a_template_that_changes_the_words_is_refused(template):
    with pytest.raises(UnsupportedError, match="chat_template: none"):
        PromptTemplate.from_tokenizer(tiny_tokenizer(template))


def test_pieces_join_where_the_tokenizer_puts_a_space_before_every_text():
    """As Llama 2 does: a piece in the middle must not get a space of its own."""
    tokens = ["<unk>", "▁", "\n", *"abc:", "▁a", "▁b"]
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace()
    prompt = PromptTemplate.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    names = prompt.tokenizer.convert_ids_to_tokens
    assert names(prompt.encode("a: b")) == ["a", ":", "▁b"]
    assert names(prompt.encode(" b")) == ["▁b"]
    assert prompt.encode("a:") + prompt.encode(" b") == prompt.encode("a: b")


def test_shared_prefix():
    assert shared_prefix((1, 2, 3), (1, 2, 4, 5)) == 2
    assert shared_prefix((1, 2), (1, 2, 3)) == 2
    assert shared_prefix((), (1,)) == 0
