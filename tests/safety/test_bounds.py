"""Numbers of a file are looked at before they are believed, programs in it end, and a library that
gives up is one line.
"""

import copy
import errno
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

from damage import bounded, refusal
from training.runs import write_text
from wakeful import paths
from wakeful.cli import TERMINATED, main
from wakeful.cli.verbs import VERBS
from wakeful.data.preparing import prepare
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import PreparedData
from wakeful.errors import WakefulError
from wakeful.guard import lacks_memory, wrap_errors
from wakeful.loading.chat import user_turn
from wakeful.loading.load import load, read_decoder
from wakeful.loading.template import render_template
from wakeful.paths import temporary_path_beside
from wakeful.runs.run import disk_errors

pytestmark = pytest.mark.usefixtures("as_users_run_it")
TALK = [
    {"role": "user", "content": " hi there "},
    {"role": "assistant", "content": "</think>\nyes"},
]
GROWING = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = "
ENDLESS = {
    "product": "{{ 'a' * 10**10 }}",
    "nested loops": "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2,
    "doubled": GROWING + "ns.x ~ ns.x %}{% endfor %}",
    "added": GROWING + "ns.x + ns.x %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "filter": "{{ 'a'|center(10000000000) }}",
    "method": "{{ 'a'.ljust(10000000000) }}",
    "width": "{{ '%99999999999d' % 1 }}",
    "own width": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "replaced": "{% set a = 'aaaaaaaaaa' * 10000 %}{{ a.replace('', a) }}",
    "indented": "{{ ('\n' * 100000)|indent(9999, blank=true) }}",
    "text in a loop": "{% for i in range(99999) %}" + "x" * 200_000 + "{% endfor %}",
    "lists of lists": "{% set l0 = 'aaaaaaaa' %}"
    + "".join(f"{{% set l{n + 1} = [{', '.join([f'l{n}'] * 10)}] %}}" for n in range(11))
    + "{{ l11 }}",
    "slices": "{% set a = 'aaaaaaaaaa' * 100000 %}{% set b = [" + "a[1:]," * 3000 + "] %}",
    "set block": "{% set a = 'aaaaaaaaaa' * 100000 %}{% set b %}"
    + "{{ a }}" * 3000
    + "{% endset %}",
    "long": "x" * 10**7,
    "output": "{{ 'a' * 10**7 }}",
}
USUAL = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "reversed": "{%- set ns = namespace(last=messages|length - 1) %}\n"
    "{%- for m in messages[::-1] %}\n{%- set index = (messages|length - 1) - loop.index0 %}\n"
    "{%- if m.role == 'user' and "
    "m.content is string %}\n{%- set ns.last = index %}{% endif %}{% endfor %}{{ ns.last }}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{- m.content.split('</think>')[-1].lstrip('\n') ~ loop.last ~ loop.length }}"
    "{% endgeneration %}{% endif %}{% endfor %}",
    "all kinds": "{% macro f(a, b=2) %}{{ a }}:{{ b|tojson }}{{ caller() if caller }}{% endmacro %}"
    "{{ bos_token }}{% for m in messages if m.role != 'x' %}{{ f(m.content, m) }}"
    "{% if loop.index > 1 %}{% break %}{% endif %}{% else %}none{% endfor %}"
    "{% call f('x') %}{{ eos_token ~ 1 ~ none ~ true }}{% endcall %}"
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}"
    "{{ '%s-%d' % ('a', 3) }}{{ '{}|{}'.format(1, 2.5) }}{{ 2 ** 3 * 4 + 1 % 2 }}"
    "{{ dict(a=1).items() | list }}{{ [1, 2] + [3] }}{{ 'a' * 3 }}{{ nothing }}"
    "{{ messages[0].content | trim | upper | replace('H', 'J') | indent(2) }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_a_chat_template_ends(name: str) -> None:
    """The parent neither waits for ever nor holds what a template writes."""
    with (
        bounded(seconds=60, megabytes=500),
        pytest.raises(ValueError, match=r"takes more|writes|read"),
    ):
        render_template(ENDLESS[name], TALK, add_generation_prompt=True)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", USUAL)
def test_a_chat_template_gives_what_transformers_makes_of_it(name: str, count: int) -> None:
    given = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": count == 1}
    ((theirs,), _) = render_jinja_template([TALK[:count]], chat_template=USUAL[name], **given)
    assert render_template(USUAL[name], TALK[:count], **given) == theirs


def test_an_endless_template_is_one_line(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["a b c"], 257)
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(ENDLESS["product"])
    with pytest.raises(WakefulError, match=r"cannot be rendered \(it takes more than"):
        user_turn(Tokenizer.load(tmp_path))


def test_a_templates_name_is_no_path(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["a b c"], 257)
    tokenizer.save(tmp_path / "in")
    config = tmp_path / "in" / "tokenizer_config.json"
    table = json.loads(config.read_text())
    for name in ("../..", "../out", "a/b", "", None, 3):
        table["chat_template"] = [{"name": name, "template": "x"}]
        config.write_text(json.dumps(table | {"bos_token": "<|endoftext|>"}))
        loaded = Tokenizer.load(tmp_path / "in")
        with pytest.raises(WakefulError, match="must have a name of letters"):
            loaded.without_bos().save(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def described() -> dict[str, Any]:
    return json.loads(Tokenizer.train(["def f(x): return x"] * 5, 270).inner.to_str())


def put_around(*single: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(single), "pair": [], "special_tokens": {}}


def model(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table["model"].update(changes)


def part(**parts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table.update(parts)


DAMAGED: dict[str, Callable[[dict[str, Any]], None]] = {
    "a token that is not there": part(
        post_processor=put_around({"SpecialToken": {"id": "X", "type_id": 0}})
    ),
    "a second text": part(post_processor=put_around({"Sequence": {"id": "B", "type_id": 0}})),
    "a charsmap": part(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a charsmap of 16 GB": part(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "////////////////"}
    ),
    "no length": part(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a prefix of merges": model(continuing_subword_prefix="##", end_of_word_suffix="</w>"),
    "one id": lambda table: table["model"].update(vocab=dict.fromkeys(table["model"]["vocab"], 5)),
    "merges of nothing": model(merges=[["zz", "yy"]]),
    "no unknown": part(model={"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": 1}),
    "an id": lambda table: table["model"]["vocab"].update({"zz": 2_000_000_000}),
    "an added id": lambda table: table["added_tokens"].append(
        table["added_tokens"][0] | {"id": 2_000_000_000, "content": "zz"}
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_tokenizer_is_one_line(tmp_path: Path, name: str) -> None:
    table = copy.deepcopy(described())
    DAMAGED[name](table)
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))

    def use() -> None:
        tokenizer = Tokenizer.load(tmp_path)
        tokenizer.encode("def a b")
        _ = tokenizer.opening
        tokenizer.encode_marked("def a b")
        tokenizer.decode([1, 2, 3])

    assert refusal(use, seconds=20, megabytes=500)


def test_lengths_that_a_tokenizer_pads_to_are_not_kept(tmp_path: Path) -> None:
    fixed = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
             "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(described() | {"padding": fixed}))
    with bounded(seconds=20, megabytes=500):
        tokenizer = Tokenizer.load(tmp_path)
        assert len(tokenizer.encode_marked("def")) < 4
        assert tokenizer.opening == []


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(
        LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                    num_attention_heads=2, max_position_embeddings=32)
    ).save_pretrained(folder)  # fmt: skip
    Tokenizer.train(["a b c"], 257).save(folder)
    return folder


def edited(folder: Path, work: Path, file: str, change: Callable[[dict[str, Any]], None]) -> Path:
    for path in folder.iterdir():
        (work / path.name).write_bytes(path.read_bytes())
    table = json.loads((work / file).read_text())
    change(table)
    (work / file).write_text(json.dumps(table))
    return work


def test_a_token_of_any_id_takes_no_memory(llama: Path, tmp_path: Path) -> None:
    work = edited(llama, tmp_path, "tokenizer.json", DAMAGED["an id"])
    for call in (
        lambda: load(str(work), device="cpu"),
        lambda: read_decoder(work).wakeful_tokenizer,
    ):
        assert "an id 2000000000" in refusal(call, seconds=20, megabytes=500)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "jamba", "architectures": ["JambaForCausalLM"], "num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**9},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"model_type": "t5", "num_decoder_layers": 10**9},
    ],
)
def test_layers_without_end_are_refused_before_they_are_listed(
    llama: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    work = edited(llama, tmp_path, "config.json", lambda table: table.update(change))
    for call in (lambda: load(str(work), device="cpu"), lambda: read_decoder(work)):
        assert "must lie between 1 and 10,000" in refusal(call, seconds=20, megabytes=500)


@pytest.mark.parametrize("text", ["ab c"[:2] * 100_000, "\0" * 10**6, "a" * 10**6, " " * 10**6])
def test_a_word_without_end_trains_a_tokenizer_in_time(text: str) -> None:
    with bounded(seconds=60):
        tokenizer = Tokenizer.train([text], 4096)
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]


def test_ordinary_words_are_trained_on_as_they_are() -> None:
    text = "def function(value):\n    return value\n" * 30
    assert Tokenizer.train([text], 300).vocab_size > 270


def test_ctrl_c_ends_the_training_of_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tokenizers.Tokenizer.train_from_iterator", lambda *_: time.sleep(30), raising=False
    )
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            Tokenizer.train(["a b c"], 300)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 10


@pytest.fixture
def data(tmp_path: Path) -> Path:
    prepare(str(write_text(tmp_path / "text")), tmp_path / "data", vocab_size=280,
            validation_fraction=0.1)  # fmt: skip
    return tmp_path / "data"


def test_an_array_that_is_a_zip_is_refused(data: Path) -> None:
    file = data / "train.documents.npy"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("x.npy", b"x")
    with pytest.raises(WakefulError, match=r"train\.documents\.npy is damaged"):
        PreparedData.open(data)


def test_tokens_that_are_cut_while_they_are_mapped_are_refused(data: Path) -> None:
    train = PreparedData.open(data).train
    starts = np.zeros(2, np.int64)
    assert train.read(starts, 8).shape == (2, 8)
    with (data / "train.tokens").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(WakefulError, match="4096 bytes are left of"):
        train.read(starts, 8)


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    own = temporary_path_beside(tmp_path / "model")
    machine, boot, process = own.name.split(".")[2:5]
    assert process == str(os.getpid())
    dead, alive = done.stdout.strip(), str(os.getppid())
    names = {
        f".a.{machine}.{boot}.{dead}.00000000.part": False,
        f".b.{machine}.00000000.{alive}.00000000.part": False,  # before the machine began anew
        f".c.{machine}.{boot}.{alive}.00000000.part": True,
        f".d.00000000.{boot}.{dead}.00000000.part": True,
        ".e.part": True,
        "mine.part": True,
    }
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / f".f.{machine}.{boot}.{dead}.00000000.part").symlink_to(kept)
    paths._remove_abandoned.cache_clear()
    temporary_path_beside(tmp_path / "other")
    there = {path.name for path in tmp_path.iterdir()} - {"kept"}
    assert there == {name for name, stays in names.items() if stays}
    assert kept.is_dir()
    assert len(temporary_path_beside(tmp_path / ("ä" * 120)).name.encode()) < 255


WORKS = """
import sys, time
from dataclasses import replace
from pathlib import Path
from wakeful.cli import main, verbs
from wakeful.hf.weights_out import create_folder

def works(arguments):
    with create_folder(Path(arguments[0]), "card") as part:
        (part / "model").write_text("half")
        print("half", flush=True)
        time.sleep(60)

verbs.VERBS["presets"] = replace(verbs.VERBS["presets"], run=works)
sys.exit(main(["presets", sys.argv[1]]))
"""


@pytest.mark.slow
def test_sigterm_leaves_nothing_half_written(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKS, str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    assert [*tmp_path.iterdir()]
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == TERMINATED
    assert "Traceback" not in said
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError("12288 requested and 4096 written")],
)
def test_a_full_disk_is_named(tmp_path: Path, error: OSError) -> None:
    with (
        pytest.raises(WakefulError, match="free some space, then resume or give the command again"),
        disk_errors(tmp_path / "x"),
    ):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("unable to mmap 9 bytes from file <x>: Cannot allocate memory (12)"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_memory_that_is_full_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lacks_memory(error)
    with (
        pytest.raises(WakefulError, match=r"x\.bin: it does not fit into memory"),
        wrap_errors("x.bin"),
    ):
        raise error

    def broken(_: list[str]) -> None:
        raise error

    monkeypatch.setitem(VERBS, "presets", replace(VERBS["presets"], run=broken))
    assert main(["presets"]) == 1
    said = capsys.readouterr().err
    assert "memory is full" in said
    assert "lower --batch_size" in said


def test_ctrl_c_and_bugs_go_through_the_guard() -> None:
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)), wrap_errors("x"):
            raise error
    with pytest.raises(WakefulError, match="told"), wrap_errors("x"):
        raise WakefulError("told")
    with (
        pytest.raises(WakefulError, match=r"^x: unpack requires.*; then$"),
        wrap_errors("x", "; then"),
    ):
        struct.unpack("<Q", b"")
