"""Token ids on disk: a tuple to whoever looks, and no memory that grows with the samples of a sweep."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tiny_tokenizer import tiny_tokenizer

from kveval.prompting import PromptTemplate
from kveval.tasks import Sample, TaskContext, known_tasks, load_task

TEXT = ("traffic", "perplexity", "long_ppl", "code_identifier", "code_completion")
"""Tasks of a text source, whose tokens they keep as long as the source is in use, whatever the number of samples."""


def sample(prompt: tuple[int, ...], *, short: tuple[int, ...] = ()) -> Sample:
    return Sample("s", 0, prompt, (1,), 9, None, "c", short_prompt_ids=short)


@pytest.mark.parametrize("ids", [(), (0,), (5, 2**31 - 1, 7), tuple(range(100_000))], ids=len)
def test_a_field_is_the_tuple_that_it_was_given(ids: tuple[int, ...]) -> None:
    one, other = sample(ids, short=ids[:1]), sample((4, 2))
    assert one.prompt_ids == ids
    assert type(one.prompt_ids) is tuple
    assert one.short_prompt_ids == ids[:1]
    assert other.prompt_ids == (4, 2)
    assert f"prompt_ids={ids!r}" in repr(one)
    assert one == sample(list(ids), short=ids[:1]) != other  # type: ignore[arg-type]
    for twin in (replace(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert twin == one
    assert replace(one, prompt_ids=(8,)).prompt_ids == (8,)


def test_ids_that_no_tokenizer_has_are_refused() -> None:
    with pytest.raises(OverflowError):
        sample((2**40,))


def test_threads_read_and_write_at_once() -> None:
    def made(seed: int) -> bool:
        ids = tuple(range(seed, seed + 2000))
        samples = [sample(ids[i:]) for i in range(50)]
        return all(s.prompt_ids == ids[i:] for i, s in enumerate(samples))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(made, range(32)))


def test_a_fork_reads_what_there_was_and_writes_elsewhere() -> None:
    """Processes that share a position in a file would read one another's samples."""
    program = (
        "import os\n"
        "from kveval.token_ids import _Stored\n"
        "made = [_Stored(range(i, i + 500)) for i in range(50)]\n"
        "def right(): return all(s.read() == tuple(range(i, i + 500)) for i, s in enumerate(made))\n"
        "children = []\n"
        "for child in range(4):\n"
        "    children.append(os.fork())\n"
        "    if not children[-1]:\n"
        "        own = [_Stored([child] * 500) for _ in range(50)]\n"
        "        ok = all(right() and all(s.read() == (child,) * 500 for s in own) for _ in range(20))\n"
        "        os._exit(0 if ok else 1)\n"
        "more = [_Stored([9] * 500) for _ in range(50)]\n"
        "assert all(right() and all(s.read() == (9,) * 500 for s in more) for _ in range(20))\n"
        "assert [os.waitpid(c, 0)[1] for c in children] == [0] * 4\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_full_disk_names_the_remedy_and_spoils_nothing() -> None:
    program = (
        "import resource, signal\n"
        "from kveval.errors import KvevalError\n"
        "from kveval.token_ids import _Stored\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "first = _Stored(range(1000))\n"
        "for _ in range(2):\n"
        "    try: _Stored(range(1000))\n"
        "    except KvevalError as error: assert 'TMPDIR' in error.remedy\n"
        "    else: raise AssertionError\n"
        "assert first.read() == tuple(range(1000))\n"
        "assert _Stored([7]).read() == (7,)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("name", [name for name in known_tasks() if name not in TEXT])
def test_making_more_samples_takes_no_more_memory(name: str) -> None:
    """At its peak as well: a sample leaves less than two bytes a token, its references among them."""
    tokenizer, length = tiny_tokenizer(), 6144 if name == "common_words" else 4096
    # What an answer says is kept as text: here it is short.
    task = load_task(name, {"steps": 8} if name == "long_generation" else {})
    prompt = PromptTemplate.from_tokenizer(tokenizer)

    def peak(samples: int) -> int:
        gc.collect()
        tracemalloc.start()
        made = task.samples(TaskContext(tokenizer, prompt, length, samples, seed=0))
        assert len(made) == samples
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1)  # what a process keeps for good
    assert (peak(14) - peak(5)) / 9 < 2 * length
