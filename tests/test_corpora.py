from __future__ import annotations

import os
import platform
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from kveval.corpora import (
    BLOCK_CHARS,
    MAX_UNIT_CHARS,
    Corpus,
    blocks_before,
    ids_after,
    ids_before,
    load_corpus,
    rotation_blocks,
    split_sentences,
)
from kveval.errors import TaskError, UnknownNameError
from kveval.prompting import PromptTemplate
from kveval.tasks import TaskContext, load_task


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("Dr. Smith met J. R. Lee, e.g. at 3.5 km. He left.", ["Dr. Smith met J. R. Lee, e.g. at 3.5 km.", "He left."]),
        ("The U.S. Army came. See Fig. 3 below.", ["The U.S. Army came.", "See Fig. 3 below."]),
        ('He said "Go." Then he went.', ['He said "Go."', "Then he went."]),
        ("a\r\nb.\r\n\r\nC", ["a b.", "C"]),
        ("no full stop here", ["no full stop here"]),
        ("早上好。你吃了吗？吃了！", ["早上好。", "你吃了吗？", "吃了！"]),
        ("مرحبا بك. كيف حالك؟ أنا بخير.", ["مرحبا بك.", "كيف حالك؟", "أنا بخير."]),
        ("Да. Нет.", ["Да.", "Нет."]),
        ("version 2.0 is out. it works", ["version 2.0 is out. it works"]),
        (" \n\n \r\n", []),
    ],
)
def test_split_sentences(text, units):
    assert split_sentences(text) == units


def test_one_giant_line_is_cut_at_whitespace():
    words = " ".join(f"word{i}" for i in range(500))
    units = split_sentences(words)
    assert " ".join(units) == words
    assert max(map(len, units)) <= MAX_UNIT_CHARS


def test_one_giant_word_is_cut_anywhere():
    units = split_sentences("x" * 1000)
    assert [len(u) for u in units] == [400, 400, 200]


@given(st.text(alphabet=st.sampled_from("aB.!? \n\r\t\"'。ñ你м)(1"), max_size=1200))
def test_no_character_is_lost_and_no_unit_is_empty_or_giant(text):
    units = split_sentences(text)
    assert "".join("".join(units).split()) == "".join(text.split())
    assert all(unit == unit.strip() and 0 < len(unit) <= MAX_UNIT_CHARS for unit in units)


def test_code_units_are_lines_with_their_indent():
    corpus = Corpus("c", ("def f():\n\n    return 1  \n", " " * 500 + "x"), joiner="\n")
    assert corpus.sentences[:2] == ("def f():", "    return 1")
    assert corpus.sentences[-1].strip() == "x"
    assert all(unit.strip() for unit in corpus.sentences)


@given(st.text(alphabet=st.sampled_from("ab \nñ"), max_size=300), st.data())
def test_rotation_reads_every_character_once(text, data):
    start = data.draw(st.integers(0, len(text)))
    blocks = list(rotation_blocks(text, start, block_chars=16))
    assert "".join(blocks) == text[start:] + text[:start]
    assert all(0 < len(block) <= 16 for block in blocks)


def test_starts_are_paragraphs_then_lines_then_words():
    assert Corpus("c", tuple(f"p{i}\nq" for i in range(100))).starts[:2] == (0, 6)
    assert Corpus("c", ("\n".join(["ab"] * 100),)).starts[:3] == (0, 3, 6)
    assert Corpus("c", (" ".join(["ab"] * 100),)).starts[:3] == (0, 3, 6)
    assert Corpus("c", ("one two",)).starts == (0, 4)
    assert Corpus("c", ("x" * 50,)).starts == (0,)


def test_starts_of_one_line_without_spaces_are_pieces():
    assert Corpus("c", ("  " + "早" * 1000,)).starts == (2, 402, 802)
    assert Corpus("c", ("one " + "x" * 1000,)).starts == (0, 400, 800)


@pytest.mark.parametrize("text", ["e\u0301" * 900, "👩\u200d👧" * 500])
def test_giant_words_are_not_cut_inside_a_character(text):
    pieces = [*split_sentences(text), *(text[start:] for start in Corpus("c", (text,)).starts)]
    assert len(pieces) > 4
    assert all(piece.startswith(text[0]) for piece in pieces)


def test_marks_without_end_are_cut_all_the_same():
    units = split_sentences("a" + "\u0301" * 1000)
    assert [len(unit) for unit in units] == [400, 400, 201]


@pytest.mark.parametrize(
    "text", ["x" * 3_000_000, "早。" * 500_000, "." * 500_000, "a\n" + "\n" * 500_000, "w " * 999_999]
)
def test_giant_texts_are_read_in_linear_time(text):
    # Quadratic ways took minutes and more; a busy machine is allowed for.
    began = time.process_time()
    corpus = Corpus("c", (text,))
    assert corpus.sentences
    assert corpus.starts
    assert time.process_time() - began < 20


@given(st.text(alphabet=st.sampled_from("ab \nñ"), max_size=300), st.data())
def test_backward_blocks_read_every_character_once(text, data):
    end = data.draw(st.integers(0, len(text)))
    chars = data.draw(st.integers(0, len(text)))
    blocks = list(blocks_before(text, end, chars=chars))
    read = "".join(reversed(blocks))
    assert len(read) == chars
    assert (text[end:] + text[:end]).endswith(read)
    assert all(0 < len(block) <= BLOCK_CHARS for block in blocks)


def test_backward_blocks_begin_at_whitespace_and_nest():
    text = " ".join(f"word{i}" for i in range(5000))
    end = 17_001
    short, long = (list(blocks_before(text, end, chars=chars)) for chars in (9000, len(text)))
    assert short[:2] == long[:2]
    assert all(block.startswith(" ") for block in long[:3])
    assert len(long[0]) > BLOCK_CHARS - 20


def test_tokens_around_a_place():
    text = " ".join(f"word{i}" for i in range(5000))
    ring = text[20_000:] + text[:20_000]
    after, read = ids_after(list, text, 20_000, 10_000)
    assert "".join(after) == ring[:10_000]
    assert 10_000 <= read <= 10_002
    before, read = ids_before(list, text, 20_000, 30_000, chars=len(text))
    assert "".join(before) == ring[-30_000:]
    assert 30_000 <= read < 30_000 + BLOCK_CHARS
    assert ids_before(list, text, 20_000, 30_000, chars=100) == (tuple(ring[-100:]), 100)
    assert ids_after(list, "abc", 1, 5) == (("b", "c", "a"), 3)
    assert ids_before(list, "abc", 1, 0, chars=3) == ((), 0)


def test_places_are_spread_and_do_not_depend_on_their_number():
    corpus = Corpus("c", tuple(f"p{i:04d}" for i in range(1000)))
    places = corpus.spread(0.3, 16)
    assert places == corpus.spread(0.3, 40)[:16]
    parts = sorted(place * 16 // len(corpus.text) for place in places)
    assert parts == list(range(16))
    assert set(places) <= set(corpus.starts)
    with pytest.raises(TaskError, match="'c' is too short for 3 different passages"):
        Corpus("c", ("one two",)).spread(0.0, 3)


def test_bundled_sources():
    noise = load_corpus("noise")
    assert len(noise.sentences) == 5
    assert noise.identity() == {"name": "noise", "digest": noise.digest}
    docs = load_corpus("python-docs")
    assert docs == load_corpus("prose")
    assert docs.identity()["python"] == platform.python_version()
    assert sum(map(len, docs.documents)) > 300_000


def test_python_code_leaves_tests_and_installed_packages_out():
    code = load_corpus("python-code")
    assert code.joiner == "\n"
    assert any("class OrderedDict" in text for text in code.documents)
    assert not any("import pytest" in text for text in code.documents)


def test_digest_depends_on_content_and_boundaries_only():
    assert Corpus("a", ("xy", "z")).digest == Corpus("b", ("xy", "z")).digest
    assert Corpus("a", ("x", "yz")).digest != Corpus("a", ("xy", "z")).digest


def test_files(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"Second.\r\nLine")
    (tmp_path / "a.txt").write_bytes("\ufeffFirst.".encode())
    corpus = load_corpus(f"file:{tmp_path}/*.txt")
    assert corpus.documents == ("First.", "Second.\nLine")
    assert corpus.name == "file:2 files from a.txt"
    assert load_corpus(f"file:{tmp_path}/b.txt").identity()["name"] == "file:b.txt"


def test_empty_files_among_others_are_no_documents(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "__init__.py").write_text("")
    (tmp_path / "sub" / "b.py").write_text("b = 1")
    (tmp_path / "a.py").write_text("a = 1")
    corpus = load_corpus(f"file:{tmp_path}/**/*.py")
    assert corpus.documents == ("a = 1", "b = 1")
    assert corpus.names == ("a.py", "sub/b.py")
    (tmp_path / "a.py").write_text("\ufeff\n")
    (tmp_path / "sub" / "b.py").write_text(" ")
    with pytest.raises(TaskError, match="all 3 files are empty"):
        load_corpus(f"file:{tmp_path}/**/*.py")


def test_an_edited_file_is_read_again(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    before = load_corpus(f"file:{path}").digest
    path.write_text("new")
    os.utime(path, ns=(1, 1))
    assert load_corpus(f"file:{path}").digest != before


def test_file_errors(tmp_path):
    with pytest.raises(TaskError, match="no file matches"):
        load_corpus(f"file:{tmp_path}/none.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(TaskError, match=r"empty\.txt is empty"):
        load_corpus(f"file:{tmp_path}/empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(TaskError, match=r"latin\.txt is not UTF-8 text \(byte 3\)"):
        load_corpus(f"file:{tmp_path}/latin.txt")


def test_unknown_source_suggests():
    with pytest.raises(UnknownNameError, match="python-docs"):
        load_corpus("python-doc")
    with pytest.raises(UnknownNameError):
        load_corpus("file:")


class FakeRows(dict):
    @property
    def column_names(self):
        return list(self)


def fake_datasets(monkeypatch, load):
    class DatasetsError(Exception):
        pass

    monkeypatch.setitem(
        sys.modules,
        "datasets",
        SimpleNamespace(load_dataset=load, exceptions=SimpleNamespace(DatasetsError=DatasetsError)),
    )


def test_dataset(monkeypatch):
    calls = []

    def load(name, config, *, split):
        calls.append((name, config, split))
        return FakeRows(text=["One.", " ", "Two."], page=["x"])

    fake_datasets(monkeypatch, load)
    assert load_corpus("datasets:me/wiki:en:train[:10]").documents == ("One.", "Two.")
    assert load_corpus("datasets:me/wiki").documents == ("One.", "Two.")
    assert load_corpus("datasets:me/wiki::test:page").documents == ("x",)
    assert calls == [("me/wiki", "en", "train[:10]"), ("me/wiki", None, "train"), ("me/wiki", None, "test")]
    with pytest.raises(TaskError, match=r"no column 'nope'[\s\S]*text, page"):
        load_corpus("datasets:me/wiki:::nope")
    with pytest.raises(TaskError, match="too many parts"):
        load_corpus("datasets:a:b:c:d:e")


def test_dataset_offline_and_absent(monkeypatch):
    def load(name, config, *, split):
        raise ConnectionError("no route")

    fake_datasets(monkeypatch, load)
    with pytest.raises(TaskError, match="can't be loaded: no route"):
        load_corpus("datasets:me/offline")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match=r"pip install 'kveval\[datasets\]'"):
        load_corpus("datasets:me/absent")


def test_dataset_without_text(monkeypatch):
    fake_datasets(monkeypatch, lambda name, config, *, split: FakeRows(text=[" "]))
    with pytest.raises(TaskError, match="holds no text"):
        load_corpus("datasets:me/blank")


# --- what the tasks make of odd texts -------------------------------------------------------------

TOKENIZER = tiny_tokenizer()
PROMPT = PromptTemplate.from_tokenizer(TOKENIZER)
ODD = {
    "no full stops": "we walk home by the road and over the hill " * 100,
    "one giant line": "The sun shines. We walk home. " * 400,
    "one giant word": "x" * 6000,
    "crlf": "The sun shines.\r\nWe walk home.\r\n\r\n" * 100,
    "lone cr": "The sun shines.\rWe walk home.\r" * 100,
    "chinese": "早上好。你吃了吗？吃了！我们走路回家。" * 100,
    "chinese without marks": "早上好你吃了吗吃了我们走路回家" * 100,
    "arabic": "مرحبا بك. كيف حالك؟ أنا بخير. " * 100,
    "hebrew with points": "שָׁלוֹם עוֹלָם. " * 200,
    "pictures": "👩\u200d👧 🙂. " * 200,
    "special tokens": "<|end|> <|user|> and <|bos|>. " * 100,
}


@pytest.fixture(params=ODD)
def odd(request, tmp_path):
    path = tmp_path / "odd.txt"
    path.write_bytes(ODD[request.param].encode())
    return path


def plain(text):
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read(ids):
    """The text of tokens; they may begin and end inside a character."""
    return TOKENIZER.decode(ids[len(PROMPT.bos_ids) :]).strip("\ufffd")


def context(length=900, samples=3):
    return TaskContext(TOKENIZER, PROMPT, length, samples, 0)


def test_haystack_fills_with_odd_text(odd):
    words = "".join(plain(odd.read_text(encoding="utf-8")).split())
    for sample in load_task("niah_single", {"filler": f"file:{odd}"}).samples(context()):
        assert len(sample.prompt_ids) + len(sample.answer_ids) == 900
        text = TOKENIZER.decode(sample.prompt_ids)
        needle = text.index(" One of the special magic numbers")
        start = text.index("Text:") + len("Text:")
        assert "".join(text[start:needle].split()) in words * 3


@pytest.mark.parametrize(("name", "params"), [("perplexity", {}), ("long_ppl", {"short_window": 50})])
def test_passages_of_odd_text_are_the_text(name, params, odd):
    text = plain(odd.read_text(encoding="utf-8"))
    task = load_task(name, {"corpus": f"file:{odd}", "scored_tokens": 100, **params})
    samples = task.samples(context())
    assert len({sample.cluster for sample in samples}) == 3
    for sample in samples:
        assert len(sample.prompt_ids) + len(sample.answer_ids) == 900
        assert read(sample.prompt_ids + sample.answer_ids) in text + text


@pytest.mark.parametrize("name", ["perplexity", "long_ppl"])
def test_text_shorter_than_the_context_is_told_by_who_repeats_none(name, tmp_path):
    (tmp_path / "short.txt").write_text("The sun shines.")
    task = load_task(name, {"corpus": f"file:{tmp_path}/short.txt", "scored_tokens": 10})
    with pytest.raises(TaskError, match=rf"has only \d+ tokens, .*{name} never repeats text[\s\S]*longer source"):
        task.samples(context(samples=1))


@pytest.mark.parametrize("name", ["niah_single", "perplexity", "long_ppl", "code_identifier", "code_completion"])
@pytest.mark.parametrize(
    ("data", "what"), [(b"", "empty"), (b"\xef\xbb\xbf \r\n", "empty"), (b"\xff\xfea", "not UTF-8")]
)
def test_files_without_text_are_told(name, data, what, tmp_path):
    (tmp_path / "bad.py").write_bytes(data)
    field = "filler" if name == "niah_single" else "corpus"
    with pytest.raises(TaskError, match=rf"bad\.py is {what}[\s\S]*(Name files|Convert)"):
        load_task(name, {field: f"file:{tmp_path}/bad.py"}).samples(context(length=2000))
