"""Elements and schemes that other packages bring through entry points, and what happens when they can't."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kveval.errors import ConfigError, UnknownNameError
from kveval.formats import spec
from kveval.formats.element_types import element_names, get_element
from kveval.formats.spec import get_scheme, scheme_names
from kveval.registry import plugin_names

HERE = Path(__file__).parent
ELEMENT_GROUP, SCHEME_GROUP = "kveval.elements", "kveval.schemes"

# A whole package: a six-bit float, and schemes that store with it.
MODULE = """
from kveval.formats.element_types import Element, minifloat

E3M2 = Element("e3m2", 6, minifloat(3, 2, bias=3), source="OCP Microscaling Formats 1.0, section 5.3")

MXFP6 = {
    "summary": "E3M2 in blocks of 32 with power-of-two scales",
    "both": {
        "element": "e3m2", "granularity": "per_group", "group_size": 32,
        "scale_rule": "mx_floor", "scale_dtype": "e8m0",
    },
}
MIXED = {"extends": "mxfp6_e3m2", "key": "nvfp4_mean_shift", "sink_tokens": 4}
"""
ENTRY_POINTS = {
    ELEMENT_GROUP: {"e3m2": "six_bits:E3M2"},
    SCHEME_GROUP: {"mxfp6_e3m2": "six_bits:MXFP6", "k4v6": "six_bits:MIXED"},
}

Groups = dict[str, dict[str, str]]
Install = Callable[[str, Groups, str], None]


def distribution(site: Path, name: str, groups: Groups, source: str) -> None:
    """What an installer leaves in `site`: a module, and the metadata that names its entry points."""
    (site / f"{name}.py").write_text(source)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution for one test."""
    caches = (plugin_names, get_element, spec._preset)
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(name: str, groups: Groups, source: str) -> None:
        distribution(tmp_path, name, groups, source)
        for cached in caches:
            cached.cache_clear()

    yield add
    for cached in caches:
        cached.cache_clear()
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


# All that a package's own test of a format needs is `check_contract`. Then keys and values through a cache.
USE = """
from format_contract import check_contract
from kveval.formats.spec import get_scheme

for name, head_dim in (("mxfp6_e3m2", 64), ("k4v6", 80)):
    check_contract(get_scheme(name).key, head_dim)
    check_contract(get_scheme(name).value, head_dim)

import torch
from kveval import QuantizedCache
from kveval.formats.element_types import element_names
from kveval.formats.spec import scheme_names

assert element_names()[-1] == "e3m2"
assert scheme_names()[-2:] == ("k4v6", "mxfp6_e3m2")

config = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 256, "head_dim": 64,
}
cache = QuantizedCache(config, "mxfp6_e3m2")
keys = torch.randn(1, 2, 10, 64, generator=torch.Generator().manual_seed(0))
values = keys.flip(-1) * 2
for layer in range(2):
    for start, end in ((0, 7), (7, 10)):
        read_keys, read_values = cache.update(keys[:, :, start:end], values[:, :, start:end], layer)
got = cache.layers[1].keys
# A block is scaled so that its largest value lies between 16 and 32, and 28 is the largest of the element: up to an
# eighth is cut; elsewhere half a step of two mantissa bits is lost.
assert got.shape == (1, 2, 10, 64)
assert 0 < ((got - keys).abs() / keys.abs().amax()).max() < 1 / 8
assert torch.equal(read_values + 0, cache.layers[1].values)
assert torch.equal(cache.layers[0].values, got.flip(-1) * 2)
assert cache.stored_bytes().stored == cache.billed_bytes() == 2 * 2 * 2 * 10 * (48 + 2)
"""


def run(script: str, site: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(HERE), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)


def test_a_package_adds_an_element_and_schemes(tmp_path: Path) -> None:
    distribution(tmp_path, "six_bits", ENTRY_POINTS, MODULE)
    done = run(USE, tmp_path)
    assert done.returncode == 0, done.stderr
    # Without the package the names are unknown.
    (tmp_path / "six_bits-1.0.dist-info" / "entry_points.txt").unlink()
    without = run("from kveval.formats.spec import get_scheme; get_scheme('mxfp6_e3m2')", tmp_path)
    assert "unknown scheme 'mxfp6_e3m2'" in without.stderr


def test_listing_names_imports_no_plugin(install: Install) -> None:
    install("six_bits", ENTRY_POINTS, "raise RuntimeError('imported')")
    assert "mxfp6_e3m2" in scheme_names()
    assert "e3m2" in element_names()
    with pytest.raises(RuntimeError, match="imported"):
        get_scheme("mxfp6_e3m2")


def test_identity_follows_the_table_of_a_foreign_element(install: Install) -> None:
    install("six_bits", ENTRY_POINTS, MODULE)
    scheme = get_scheme("mxfp6_e3m2")
    assert get_element("e3m2").foreign
    assert scheme.identity()["elements"] == {"e3m2": get_element("e3m2").digest}
    assert "elements" not in get_scheme("nvfp4").identity()
    before = scheme.identity()
    sys.modules.pop("six_bits")
    install("seven_bits", {}, "")
    changed = MODULE.replace("bias=3", "bias=4")
    Path(sys.path[0], "six_bits.py").write_text(changed + "\n# another length, so that no stale bytecode is taken\n")
    assert get_scheme("mxfp6_e3m2").identity() != before


def test_two_packages_that_claim_one_name_are_both_named(install: Install) -> None:
    install("six_bits", ENTRY_POINTS, MODULE)
    install("six_more", {ELEMENT_GROUP: {"e3m2": "six_more:E3M2"}}, MODULE)
    with pytest.raises(ConfigError, match=r"'e3m2' of kveval\.elements is claimed by six_bits, six_more.\n.*Uninstall"):
        get_element("e3m2")
    with pytest.raises(ConfigError, match="claimed by six_bits, six_more"):
        get_scheme("mxfp6_e3m2")
    assert element_names().count("e3m2") == 1


def test_a_name_of_our_own_cannot_be_claimed(install: Install) -> None:
    groups = {ELEMENT_GROUP: {"e2m1": "thief:E"}, SCHEME_GROUP: {"mxfp8": "thief:S"}}
    install("thief", groups, "E = S = None")
    with pytest.raises(ConfigError, match=r"'mxfp8' of kveval\.schemes is kveval's own, and is claimed by thief"):
        get_scheme("mxfp8")
    with pytest.raises(ConfigError, match=r"'e2m1' of kveval\.elements is kveval's own, and is claimed by thief"):
        get_element("e2m1")
    assert scheme_names().count("mxfp8") == element_names().count("e2m1") == 1
    assert get_scheme("fp8_e4m3").key.element == "e4m3"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("OTHER = 1", "has no attribute 'MXFP6'"),
        ("MXFP6 = (", "was never closed"),
        ("MXFP6 = 6", "is not a mapping as in presets.yaml"),
        ("MXFP6 = {'both': {'element': 'int4'}}", "every other element needs one"),
        ("MXFP6 = {'key': 'bf16'}", "value: Field required"),
        ("MXFP6 = {'both': 'bf16', 'sinks': 4}", "sinks: Extra inputs are not permitted"),
        ("MXFP6 = {'both': 'nvfp5'}", "unknown scheme 'nvfp5'"),
        ("MXFP6 = {'both': {'element': 'e3m3'}}", "unknown element type 'e3m3'"),
    ],
)
def test_a_broken_scheme_is_an_error_that_names_it(install: Install, source: str, message: str) -> None:
    install("six_bits", {SCHEME_GROUP: {"mxfp6_e3m2": "six_bits:MXFP6"}}, source)
    with pytest.raises(ConfigError, match=message) as caught:
        get_scheme("mxfp6_e3m2")
    if not isinstance(caught.value, UnknownNameError):
        assert "entry point mxfp6_e3m2" in caught.value.message
    assert get_scheme("nvfp4").key.element == "e2m1"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_at_all", "entry point e3m2 = six_bits:E3M2 of kveval.elements can't be loaded"),
        ("E3M2 = (0, 1, 2, 3)", "entry point e3m2 of kveval.elements is not an Element of that name"),
        (MODULE.replace('Element("e3m2"', 'Element("e2m3"'), "is not an Element of that name"),
        (MODULE.replace("minifloat(3, 2, bias=3)", "(0, 1)"), "element e3m2: 6 bits need 64 values, not 2"),
    ],
)
def test_a_broken_element_is_an_error_that_names_it(install: Install, source: str, message: str) -> None:
    install("six_bits", {ELEMENT_GROUP: {"e3m2": "six_bits:E3M2"}}, source)
    with pytest.raises(ConfigError, match=message):
        get_element("e3m2")
    assert get_element("e2m1").bits == 4
