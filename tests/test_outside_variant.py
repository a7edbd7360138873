"""A route from a module outside the package is as good as one of ours, everywhere.

The module is a file of a temporary folder that nothing of the package knows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers import EIGHT_BITS, some_tokens, tiny_config, tiny_decoder, with_eight_bits
from hf.test_export import ALONE
from training.runs import tiny, write_text
from wakeful.cli import main
from wakeful.config.schema import config_from_table, config_to_table
from wakeful.config.tables import TomlTable
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.weights_out import export_decoder
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.layers import LayerMap
from wakeful.loading.load import load
from wakeful.model.decoder import Decoder, admit
from wakeful.model.generate import generate_tokens
from wakeful.model.initialize import initialize
from wakeful.optim import OrthoAdam, decay_groups
from wakeful.quantization.convert import quantize_module, quantized_layers
from wakeful.training.cluster import JobResult, train_from_table
from wakeful.training.loop import train_run
from wakeful.variants import build
from wakeful.variants.roles import role_of

HELPER = '"""A module beside it."""\n\n\ndef damped(x, k):\n    return x / k\n'
MODULE = '''"""Values get a projection of what the layers before saw first."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outside_helper import damped
from wakeful.variants.roles import Role
from wakeful.routes import EMBEDDED, QKV, Memory, Read, ValueRoute
from wakeful.variants.shape import Shape

STREAM = Role(residual=1, decays=True, start="normal", quantized=True)


class Outside(ValueRoute):
    """V'_n = V_n + W_n x_0 / k + b_n in every layer."""

    mixes = frozenset({"value"})

    def __init__(self, *, k: int = 1) -> None:
        super().__init__()
        self.k = k

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, layers)
        wide = shape.num_kv_heads * shape.head_width
        self.maps = nn.ModuleDict({str(n): nn.Linear(shape.width, wide) for n in self.layers})
        self.table = nn.Parameter(torch.randn(len(self.layers), wide))

    def roles(self) -> Mapping[str, Role]:
        return {f"maps.{n}.weight": STREAM for n in self.layers}

    def start_plain(self) -> str:
        for part in self.maps.values():
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
        nn.init.zeros_(self.table)
        return ""

    @torch.no_grad()
    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        for n, source in enumerate(sources):
            self.maps[str(n)].load_state_dict(reference.maps[str(source)].state_dict())
            self.table[n] = reference.table[source]

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({EMBEDDED})

    def mix(self, layer: int, x: Float[Tensor, "B L D"], qkv: QKV, memory: Memory) -> QKV:
        more = damped(self.maps[str(layer)](memory[EMBEDDED]), self.k) + self.table[layer]
        return qkv._replace(v=qkv.v + more.view_as(qkv.v))
'''
ROUTE = "outside_module:Outside(k=2)"
ASKED = "add --import .*outside_module"


def forget() -> None:
    for name in ("outside_module", "outside_helper"):
        sys.modules.pop(name, None)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a folder on Python's path with the module in it, not imported."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "outside_module.py").write_text(MODULE)
    (tmp_path / "outside" / "outside_helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path / "outside"))
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def route(place: Path) -> str:
    """Give its expression, the module imported."""
    admit(tiny_config(route=ROUTE))
    return ROUTE


@pytest.mark.slow
def test_it_trains_and_resumes_to_the_bit(place: Path) -> None:
    text = write_text(place / "text")

    def run(name: str, steps: int) -> TomlTable:
        optimizer = {"name": "orthoadam", "lr": 3e-3, "warmup_steps": 2}
        return {"model": {"route": ROUTE}, "optimizer": optimizer, "train": {"steps": steps}}

    whole = train_run(tiny(text, **run("whole", 6)), place / "whole")
    assert whole.config.model.route == ROUTE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wakeful.training.loop.finish_run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_run(tiny(text, **run("cut", 6)), place / "cut")
    checkpoints = sorted((place / "cut" / "checkpoints").iterdir())
    for newest in checkpoints[1:]:
        for file in newest.iterdir():
            file.unlink()
        newest.rmdir()
    # Another process: a run names a module, and none is imported for that.
    forget()
    for attempt in (
        lambda: load(place / "whole"),
        lambda: train_run(tiny(text), place / "cut", resume=True),
    ):
        with pytest.raises(WakefulError, match=ASKED):
            attempt()
    assert "outside_module" not in sys.modules
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_IMPORT", "outside_module")
        again = load(train_run(tiny(text), place / "cut", resume=True).path).module
    expected = load(place / "whole").module
    assert str(again.route) == ROUTE
    for (name, ours), theirs in zip(again.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    # A job of a comparison has the configuration that the user wrote.
    forget()
    table = config_to_table(tiny(text, **run("cut", 6)))
    assert train_from_table(table, str(place / "cut")) == JobResult()


@pytest.mark.slow
def test_a_run_names_its_module_and_a_flag_lets_it_be_read(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files lie where no path of Python's leads."""
    for name in ("outside_module", "outside_helper"):
        (place / "outside" / f"{name}.py").rename(place / f"{name}.py")
    (place / "own_optimizer.py").write_text(
        "import torch\n\ndef own(groups, lr):\n    return torch.optim.SGD(groups, lr=lr)\n"
    )
    text, run = write_text(place / "text"), place / "run"
    table = {"model": {"route": ROUTE}, "optimizer": {"name": "own_optimizer:own"}}
    monkeypatch.chdir(place)
    train_run(tiny(text, **table), run)
    flags = [str(place / f"{name}.py") for name in ("outside_module", "own_optimizer")]
    monkeypatch.chdir("/")
    read = ["generate", str(run), "--num_tokens", "2", "--prompt", "def f("]
    forget()
    sys.modules.pop("own_optimizer")
    assert main(read) == 1
    said = capsys.readouterr().err
    assert f"{ROUTE.partition('(')[0]} is not part of wakeful" in said
    assert "add --import outside_module" in said
    assert "outside_module" not in sys.modules
    assert main([*read, "--import", *flags]) == 0
    assert capsys.readouterr().out.startswith("def f(")
    assert "WAKEFUL_IMPORT" not in os.environ
    forget()
    assert main(["train", "--resume", str(run), "--train.steps", "9", "--import", *flags]) == 0
    assert main([*read, "--import", str(place / "absent.py")]) == 1
    assert "there is no such file" in capsys.readouterr().err
    assert main([*read, "--import"]) == 1
    assert "--import takes modules or files" in capsys.readouterr().err
    sys.modules.pop("own_optimizer", None)


def test_a_table_and_a_seed_say_all_there_is(route: str) -> None:
    """Its matrices start by the seed, and what its definition draws is the same in every model."""
    config = config_from_table({"model": {"route": route, "num_layers": 2, "width": 16}}).model
    one, two, other = (initialize(Decoder(config), seed) for seed in (0, 0, 1))
    matrix, table = "route.maps.1.weight", "route.table"
    assert torch.equal(one.get_parameter(matrix), two.get_parameter(matrix))
    assert not torch.equal(one.get_parameter(matrix), other.get_parameter(matrix))
    assert abs(one.get_parameter(matrix).std() / config.init_std - 1) < 0.2
    assert torch.equal(one.get_parameter(table), other.get_parameter(table))


def test_it_decodes_with_a_cache_as_without(route: str) -> None:
    decoder = tiny_decoder(route=route)
    tokens = some_tokens(2, 9)
    cache = decoder.new_cache(2, 9)
    pieces = [decoder(piece, cache=cache) for piece in tokens.split([4, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), decoder(tokens), rtol=0, atol=1e-12)


@pytest.mark.slow
@torch.no_grad()
def test_its_export_stands_alone(route: str, place: Path) -> None:
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)
    decoder = tiny_decoder(
        dtype=torch.float32, vocab_size=270, route=f"then(resformer, {route})"
    ).eval()
    folder = place / "out"
    assert export_decoder(decoder, folder, tokenizer=tokenizer) == "wakeful"
    code = {path.name for path in folder.glob("*.py")}
    assert {"outside_module.py", "outside_helper.py"} <= code
    tokens = some_tokens(2, 9)
    torch.save((tokens, decoder(tokens)), folder / "wanted.pt")
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", ALONE, str(folder)],
        env={"HF_MODULES_CACHE": str(place / "modules"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "as exported", done.stderr
    parts = json.loads((folder / "config.json").read_text())["parts"]
    assert parts["route"] == f"then(resformer, {route})"
    assert torch.equal(load(folder).module(tokens), decoder(tokens))
    forget()
    with pytest.raises(WakefulError, match=ASKED):
        load(folder)


def test_what_cannot_go_along_is_refused_in_a_line(route: str, place: Path) -> None:
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)
    decoder = tiny_decoder(vocab_size=270, route=route)
    source = place / "outside" / "outside_module.py"
    for bad in (
        "import wakeful.variants.shape\n",
        "import outside_helper\n",
        "from wakeful import model\n",
    ):
        source.write_text(MODULE.replace("import torch\n", f"import torch\n{bad}", 1))
        with pytest.raises(WakefulError, match=r"line 6 of .*cannot be copied to an export"):
            export_decoder(decoder, place / "out", tokenizer=tokenizer)
        assert not (place / "out").exists()
    kind = type(decoder.route)
    kind.__module__, sys.modules["__main__"].Outside = "__main__", kind
    build("routes", "__main__:Outside", imports=True)
    try:
        with pytest.raises(WakefulError, match="defined in __main__, which has no file"):
            export_decoder(tiny_decoder(vocab_size=270, route="__main__:Outside"), place / "out",
                   tokenizer=tokenizer)  # fmt: skip
    finally:
        del sys.modules["__main__"].Outside


@torch.no_grad()
def test_it_is_quantized_as_its_roles_say(route: str) -> None:
    decoder = tiny_decoder(route=route, dtype=torch.float32).eval()
    small = quantize_module(decoder, EIGHT_BITS)
    layers = quantized_layers(small)
    assert {f"route.maps.{n}" for n in range(4)} <= layers.keys()
    assert torch.equal(small.get_parameter("route.table"), decoder.route.table)
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(small(tokens), with_eight_bits(decoder, layers)(tokens))


@torch.no_grad()
def test_a_shallower_heir_takes_it_over(route: str) -> None:
    reference = tiny_decoder(route=route)
    heir = inherit_blocks(reference, LayerMap((0, 2, 3), "chosen"))
    for n, source in enumerate((0, 2, 3)):
        theirs = reference.get_parameter(f"route.maps.{source}.weight")
        assert torch.equal(heir.get_parameter(f"route.maps.{n}.weight"), theirs)
    assert len(list(generate_tokens(heir, some_tokens(1, 4)[0].tolist(), num_tokens=3))) == 3
    plain = tiny_decoder()
    assert torch.equal(
        inherit_blocks(plain, LayerMap((0, 1), "first"), route=route)(some_tokens(1, 5)),
        inherit_blocks(plain, LayerMap((0, 1), "first"))(some_tokens(1, 5)),
    )


def test_orthoadam_turns_its_matrices_along_the_stream(route: str) -> None:
    decoder = tiny_decoder(route=route, dtype=torch.float32)
    optimizer = OrthoAdam(decoder.parameters(), lr=1e-2)
    lines = {tuple(line.shape): line for line in optimizer.plan() if line.why == "role"}
    matrix = decoder.get_parameter("route.maps.2.weight")
    assert role_of(matrix).residual == 1
    assert lines[tuple(matrix.shape)].axes == (1,)
    assert role_of(decoder.get_parameter("route.table")).residual is None
    assert lines[tuple(decoder.route.table.shape)].axes == ()
    decayed, kept = decay_groups(decoder.named_parameters(), weight_decay=0.1)
    assert "route.maps.2.weight" in [name for name, _ in decayed["params"]]
    assert "route.table" in [name for name, _ in kept["params"]]
    tokens, before = some_tokens(2, 9), matrix.detach().clone()
    decoder.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    assert not torch.equal(matrix, before)
