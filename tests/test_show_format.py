"""`kveval show-format` and `kveval formats`: what they say is what the formats are."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest
import yaml
from rich.console import Console

from kveval.errors import ExitCode, UnsupportedError
from kveval.formats.element_types import Element, element_names, get_element, minifloat
from kveval.formats.hardware import GPUS, native
from kveval.formats.layout import RoleFormat
from kveval.formats.scales import StaticScales
from kveval.formats.spec import TensorFormat, build_scheme, get_scheme, scheme_names
from kveval.report.format_diagram import byte_diagram, parts, token_diagram
from kveval.report.format_text import describe, format_markdown, format_renderable, formats_table, levels_text
from tests.test_cli import call

SIDES = [(name, role) for name in scheme_names() for role in ("key", "value")]


def printed(renderable, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def boxed_bytes(diagram: str) -> list[int]:
    """The byte counts in a diagram's boxes."""
    (row,) = [line for line in diagram.splitlines() if line.startswith("|") and "bytes" in line]
    return [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", row)]


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256, 576])
@pytest.mark.parametrize(("name", "role"), SIDES)
def test_the_bytes_in_a_diagram_add_up_to_the_formula(name, role, head_dim):
    fmt = getattr(get_scheme(name), role)
    count, found = parts(fmt, head_dim)
    assert count * sum(part.nbytes for part in found) == fmt.unit_bytes(head_dim)
    drawn = byte_diagram(fmt, head_dim)
    assert sum(boxed_bytes(drawn)) * count == fmt.unit_bytes(head_dim)
    assert f"{fmt.unit_bytes(head_dim):,} bytes" in drawn or f"{fmt.unit_bytes(head_dim)} bytes" in drawn


BLOCKS = {
    "q4_0": [2, 16],
    "q4_1": [2, 2, 16],
    "q5_0": [2, 4, 16],
    "q5_1": [2, 2, 4, 16],
    "q8_0": [2, 32],
    "iq4_nl": [2, 16],
}


@pytest.mark.parametrize(("name", "sizes"), BLOCKS.items())
def test_llama_cpp_blocks_have_the_fields_of_its_structs(name, sizes):
    assert boxed_bytes(byte_diagram(get_scheme(name).key, 128)) == sizes


def test_a_diagram_says_which_elements_share_a_scale():
    lines = byte_diagram(get_scheme("nvfp4").key, 128).splitlines()
    elements, scales = (next(line for line in lines if line.startswith(word)) for word in ("elements", "scale "))
    assert elements.split() == ["elements", "0-15", "16-31", "32-47", "...", "112-127"]
    assert scales.split() == ["scale", "0", "1", "2", "...", "7"]
    short = byte_diagram(get_scheme("int4_g64").key, 80)
    assert "64-79" in short


@pytest.mark.parametrize("name", scheme_names())
def test_every_preset_fits_a_terminal(name):
    facts = describe(get_scheme(name))
    for width in (80, 120):
        lines = printed(format_renderable(facts), width).splitlines()
        assert max(map(len, lines)) <= width
        for side in facts["sides"]:
            for drawing in (side["diagram"], side["token_diagram"]):
                # A diagram that is cut or wrapped is no diagram.
                assert set(drawing.splitlines()) <= {line.rstrip() for line in lines} | {""}


@pytest.mark.parametrize("name", scheme_names())
def test_what_is_said_is_what_is_stored(name):
    scheme = get_scheme(name)
    facts = describe(scheme)
    both = scheme.key.token_bytes(128) + scheme.value.token_bytes(128)
    assert facts["bytes"]["token_and_head"] == both
    assert facts["bytes"]["example_token"] == both * 32 * 8
    assert facts["append_invariant"] == scheme.append_invariant
    assert facts["append_invariance"].startswith("yes" if scheme.append_invariant else "no")
    assert list(facts["hardware"]) == list(dict.fromkeys((scheme.key.element, scheme.value.element)))
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    text = printed(format_renderable(facts), 400)
    for expected in (scheme.summary, *scheme.engines, scheme.key.element, scheme.value.element, *GPUS):
        assert expected in text


def test_literal_numbers_of_one_format():
    facts = describe(get_scheme("kivi2"))
    assert facts["bytes"]["example_token"] == 24_576
    # Of 1,024 tokens all keys are encoded; the last 128 values are BF16.
    assert facts["bytes"]["example_sequences"][0] == {
        "tokens": 1024,
        "bytes": 32 * 8 * (1024 * 48 + 896 * 48 + 128 * 256),
    }
    assert facts["bytes"]["example_wide_tokens"] == 32 * 8 * 256 * (127 + 128)
    nvfp4 = describe(get_scheme("nvfp4"))["bytes"]
    assert nvfp4["example_constants"] == 32 * 2 * 4
    assert f"{nvfp4['fewer_than_bf16']:.2f}" == "3.56"


def test_equal_sides_are_described_once():
    assert [side["for"] for side in describe(get_scheme("nvfp4"))["sides"]] == ["keys and values"]
    assert [side["for"] for side in describe(get_scheme("k8v4"))["sides"]] == ["keys", "values"]


def test_tokens_that_stay_wide_are_drawn():
    scheme = build_scheme("mine", {"extends": "kivi4", "sink_tokens": 4})
    keys, values = (side["token_diagram"] for side in describe(scheme)["sides"])
    assert "first 4" in keys
    assert "last 0 to 127" in keys
    assert "BF16 until they are 128" in keys
    assert "last 128" in values
    assert token_diagram(RoleFormat(get_scheme("nvfp4").key)) == ""
    assert token_diagram(RoleFormat(TensorFormat(element="bf16"), 4, 128)) == ""


def test_layer_overrides_are_described_and_counted():
    data = {
        "extends": "int4_g32",
        "skip_layers": ["first:2"],
        "layers": [{"layers": ["last:2"], "both": "fp8_e4m3"}, {"layers": [5], "value": "kivi2"}],
    }
    scheme = build_scheme("mixed", data)
    facts = describe(scheme)
    assert [side["for"] for side in facts["sides"]] == [
        "keys and values",
        "keys and values of layers last:2",
        "values of layers 5",
    ]
    # 2 layers BF16, 2 in 8 bits, 27 with 5 bits on both sides, 1 with 5 and 3 bits.
    assert facts["bytes"]["example_token"] == 8 * (2 * 512 + 2 * 256 + 27 * 160 + 80 + 48)
    assert "Layers first:2 stay BF16." in facts["where"]
    assert "uint2" in printed(format_renderable(facts))


def test_layers_that_the_example_lacks_are_named():
    scheme = build_scheme("mine", {"extends": "nvfp4", "layers": [{"layers": ["sliding"], "both": "fp8_e4m3"}]})
    facts = describe(scheme)
    assert facts["bytes"]["example_sequences"] is None
    assert "'sliding'" in facts["bytes"]["no_example"]
    assert "not counted for this example" in printed(format_renderable(facts), 200)


def test_calibrated_scales_are_named():
    scales = StaticScales(source="scales.json", key={0: (0.5,)}, value={0: (0.5,)})
    scheme = get_scheme("fp8_e4m3").model_copy(update={"scales": scales})
    assert describe(scheme)["sides"][0]["scale"] == "calibrated, from scales.json"
    assert "the constant 1" in describe(get_scheme("fp8_e4m3"))["sides"][0]["scale"]


def test_a_head_that_can_not_be_stored_is_refused():
    with pytest.raises(UnsupportedError, match="80"):
        describe(get_scheme("q4_0"), head_dim=80)


@pytest.mark.parametrize("name", element_names())
def test_levels_are_those_of_the_element(name):
    element = get_element(name)
    text = levels_text(element)
    numbers = {float(n) for n in re.findall(r"-?[\d.]+(?:e[+-]\d+)?", text)}
    if element.wide:
        assert "bfloat16" in text
    elif len(set(element.numbers)) <= 16:
        assert {abs(n) for n in element.numbers} == {abs(n) for n in numbers}
        assert ("±" in text) == (min(element.numbers) == -max(element.numbers))
    else:
        assert {min(element.numbers), max(element.numbers)} <= numbers


@pytest.mark.parametrize(
    ("element", "gpu", "convert", "multiply"),
    [
        ("e4m3", "Ampere", "bit operations", "no"),
        ("e4m3", "Ada", "to fp16 pairs", "yes"),
        ("e4m3", "Hopper", "to fp16 pairs", "yes, short accumulator"),
        ("e4m3", "Blackwell", "to fp16 or bf16 pairs", "yes"),
        ("e2m1", "Hopper", "bit operations", "no"),
        ("e2m1", "Blackwell", "to fp16 or bf16 pairs", "yes, with block scales"),
        ("int8", "Ampere", "int to float", "yes"),
        ("iq4_nl", "Blackwell", "table lookup", "no"),
        ("of a package of yours", "Ada", "table lookup", "no"),
    ],
)
def test_what_hardware_does(element, gpu, convert, multiply):
    found, i = native(element), GPUS.index(gpu)
    assert (found.convert[i], found.multiply[i]) == (convert, multiply)


@pytest.mark.parametrize("name", scheme_names())
def test_markdown_has_balanced_code_blocks(name):
    text = format_markdown(describe(get_scheme(name)))
    assert text.startswith(f"## `{name}`\n")
    assert text.count("```") % 2 == 0
    assert text.count("+--") >= 2


def test_the_listing_names_every_preset():
    for width in (80, 120):
        text = printed(formats_table([get_scheme(name) for name in scheme_names()]), width)
        assert max(map(len, text.splitlines())) <= width
        assert {line.split()[0] for line in text.splitlines() if line[:1].strip()} >= set(scheme_names())


def test_commands(monkeypatch, capsys, tmp_path):
    code, out, _ = call(monkeypatch, capsys, "show-format", "nvfp4", "--head-dim", "64", "--json")
    assert code == 0
    assert json.loads(out)["bytes"]["token_and_head"] == 2 * (32 + 4)
    code, out, _ = call(monkeypatch, capsys, "show-format", "q5_1")
    assert "qh: fifth bits" in out
    code, out, _ = call(monkeypatch, capsys, "formats")
    assert "turboquant_k3v4" in out
    code, out, _ = call(monkeypatch, capsys, "formats", "--json")
    assert [facts["name"] for facts in json.loads(out)] == list(scheme_names())
    code, out, err = call(monkeypatch, capsys, "show-format", "nvpf4")
    assert (code, out) == (ExitCode.USAGE, "")
    assert "Did you mean 'nvfp4'" in err
    code, _, err = call(monkeypatch, capsys, "show-format", "q4_0", "--head-dim", "80")
    assert code == ExitCode.USAGE
    assert "multiple" in err


def test_a_scheme_of_a_sweep_can_be_shown(monkeypatch, capsys, tmp_path):
    own = {"name": "mine", "extends": "k8v4", "sink_tokens": 4}
    sweep = {"model": {"id": "m"}, "schemes": [own], "tasks": ["niah_single"], "context_lengths": [512]}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    code, out, _ = call(monkeypatch, capsys, "show-format", "mine", "--config", str(tmp_path / "sweep.yaml"))
    assert code == 0
    assert "first 4" in out
    code, out, _ = call(monkeypatch, capsys, "show-format", "kivi4", "--config", str(tmp_path / "sweep.yaml"))
    assert out.startswith("kivi4")


def test_nothing_heavy_is_loaded():
    script = (
        "import sys; sys.argv = ['kveval', 'show-format', 'kivi4']\n"
        "from kveval import cli\n"
        "try:\n    cli.main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'transformers', 'pandas'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kivi4" in done.stdout


def test_levels_of_an_element_that_no_preset_uses():
    e3m0 = Element("e3m0", 4, minifloat(3, 0, bias=3), source="a test")
    assert levels_text(e3m0) == "0, ±0.25, ±0.5, ±1, ±2, ±4, ±8, ±16"


def test_doctor_reports_a_broken_format_and_goes_on(monkeypatch):
    from kveval import doctor

    broken = build_scheme("broken", {"extends": "nvfp4", "layers": [{"layers": ["sliding"], "both": "bf16"}]})
    mixed = build_scheme("mixed", {"extends": "nvfp4", "layers": [{"layers": ["last:2"], "both": "fp8_per_head"}]})
    idle = build_scheme("idle", {"extends": "nvfp4", "skip_layers": ["full"]})
    own = {scheme.name: scheme for scheme in (broken, mixed, idle)}
    monkeypatch.setattr(doctor, "scheme_names", lambda: (*own, "kivi2"))
    monkeypatch.setattr(doctor, "get_scheme", lambda name: own.get(name) or get_scheme(name))
    found = {row["scheme"]: row for row in doctor.examine()["schemes"]}
    assert {name: row["works"] for name, row in found.items()} == {
        "broken": False, "mixed": True, "idle": False, "kivi2": True,
    }  # fmt: skip
    assert "'sliding'" in found["broken"]["problem"]
    assert found["idle"]["problem"] == "nothing was encoded"
    assert found["kivi2"]["keys"] == "uint2 per_channel 32"
