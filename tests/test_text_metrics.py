"""Scores of written answers, with golden values from their definitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from kveval.errors import ConfigError, MeasurementError, UnknownNameError
from kveval.text_metrics import (
    TEXT_METRICS,
    edit_similarity,
    line_match,
    string_match_all,
    string_match_part,
    text_exact_match,
    text_f1,
    text_metric,
)

FOUR = ("1111111", "2222222", "3333333", "4444444")


@pytest.mark.parametrize(
    ("text", "references", "every", "part"),
    [
        ("The numbers are 1111111, 2222222, 3333333 and 4444444.", FOUR, 1.0, 1.0),
        ("1111111 and 4444444", FOUR, 0.5, 1.0),
        ("nothing", FOUR, 0.0, 0.0),
        ("", FOUR, 0.0, 0.0),
        ("PARIS it is", ("paris",), 1.0, 1.0),
        ("Pa\x01ris", ("paris",), 0.0, 0.0),  # a control character is a newline, not nothing
        ("one\x00two", ("one\ntwo",), 1.0, 1.0),
        ("one of three", ("one", "two", "six"), 1 / 3, 1.0),  # where `part` gives 1, a known port gives 0.33
        ("3,677 seated", ("3,677",), 1.0, 1.0),
        ("3677 seated", ("3,677",), 0.0, 0.0),  # strict, as defined
    ],
)
def test_substring_recall(text: str, references: tuple[str, ...], every: float, part: float) -> None:
    assert string_match_all(text, references) == every
    assert string_match_part(text, references) == part


def test_a_list_of_everything_loses_precision_in_f1_alone() -> None:
    spam = " ".join(str(number) for number in range(1111111, 1111111 + 96)) + " " + " ".join(FOUR[1:])
    assert string_match_all(spam, FOUR) == 1.0
    assert text_f1(spam, FOUR) == pytest.approx(2 * 4 / (99 + 4))
    assert text_f1("1111111, 2222222, 3333333, 4444444", FOUR) == 1.0
    assert text_f1("2222222", FOUR) == 1.0  # one of several alternatives


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        ("the red house", "the red house", 1.0),
        ("the red", "the red house", 2 * 2 / (2 + 3)),
        ("the the the", "the red house", 2 * 1 / (3 + 3)),
        ("a green tree", "the red house", 0.0),
        ("", "the red house", 0.0),
    ],
)
def test_f1_of_words(text: str, reference: str, score: float) -> None:
    assert text_f1(text, [reference]) == pytest.approx(score)


def test_exact_text_forgives_case_spaces_and_a_full_stop() -> None:
    assert text_exact_match("  New   York.\n", ["new york"]) == 1.0
    assert text_exact_match("New York City", ["new york"]) == 0.0
    assert text_exact_match("1111111, 2222222, 3333333, 4444444.", FOUR) == 1.0
    assert text_exact_match("2222222, 1111111, 3333333, 4444444.", FOUR) == 0.0


def test_edit_similarity() -> None:
    assert edit_similarity("  return x\n", ["return x"]) == 1.0
    assert edit_similarity("return y", ["return x"]) == pytest.approx(2 * 7 / 16)
    assert edit_similarity("", ["return x"]) == 0.0
    assert edit_similarity("abcd", ["zzzz", "abcx"]) == pytest.approx(2 * 3 / 8)
    assert edit_similarity("ab, cd", ["ab", "cd"]) == 1.0


def test_line_match_looks_at_the_first_line() -> None:
    assert line_match("\n  return x  \nmore", ["return x\nother"]) == 1.0
    assert line_match("return y", ["return x"]) == 0.0
    assert line_match("", ["return x"]) == 0.0


@pytest.mark.parametrize("name", TEXT_METRICS)
def test_the_answer_itself_scores_one_and_nothing_scores_zero(name: str) -> None:
    assert text_metric(name)("42 is right", ["42 is right"]) == 1.0
    assert text_metric(name)("", ["42 is right"]) == 0.0


def test_a_metric_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def starts(text, references):\n    return any(text.startswith(r) for r in references)\n")
    assert text_metric(f"{file}:starts")("42 is", ["42"]) == 1.0
    with pytest.raises(ConfigError, match=r"mine\.py has no function 'ends'"):
        text_metric(f"{file}:ends", where="sweep.yaml:7")
    file.write_text("def starts(text, references):\n    return 7\n")
    with pytest.raises(MeasurementError, match="gave 7"):
        text_metric(f"{tmp_path}/./mine.py:starts", where="again")("42", ["42"])
    with pytest.raises(UnknownNameError, match="string_match_all"):
        text_metric("string_match_al")
    with pytest.raises(ConfigError, match="no file"):
        text_metric("missing.py:f")


def test_what_ones_own_metric_raises_is_told_in_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def raises(text, references):\n    raise KeyError('boom')\n"
        "def nan(text, references):\n    return float('nan')\n"
        "def one(text):\n    return 1.0\n"
    )
    with pytest.raises(MeasurementError, match=r"mine\.py:raises failed: KeyError: 'boom'"):
        text_metric(f"{file}:raises")("42", ["42"])
    with pytest.raises(MeasurementError, match="gave nan"):
        text_metric(f"{file}:nan")("42", ["42"])
    with pytest.raises(ConfigError, match=r"mine\.py:one can't be called with a text and references"):
        text_metric(f"{file}:one")
