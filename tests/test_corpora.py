from __future__ import annotations

import os
import platform
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kveval.corpora import MAX_UNIT_CHARS, Corpus, load_corpus, rotation_blocks, split_sentences
from kveval.errors import TaskError, UnknownNameError


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
