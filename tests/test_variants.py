"""Expressions: what they build, and that nothing in them is ever run."""

import importlib
import sys

import pytest
import torch

from helpers import tiny_config
from wakeful.depth import DenseFormer
from wakeful.errors import WakefulError, did_you_mean
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.modeling import WakefulForCausalLM
from wakeful.model.decoder import Decoder, admit
from wakeful.normalizers import Softmax1
from wakeful.norms import RMSNormSingle
from wakeful.placements import Mixed
from wakeful.ropes import Linear
from wakeful.routes import OnLayers, ResFormer, SVFormer, Then
from wakeful.variants import build, variants_by_name

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def test_an_expression_becomes_the_object_it_names():
    route = build("routes", 'then(resformer(mode="learnable", init=(0, 1)), on_layers([2], own))')
    assert isinstance(route, Then)
    first, second = route.parts
    assert isinstance(first, ResFormer)
    assert isinstance(second, OnLayers)
    assert (first.mode, first.init) == ("learnable", (0.0, 1.0))
    assert second.which == [2]
    assert str(route) == ("then(resformer(mode='learnable', init=(0.0, 1.0)), on_layers([2], own))")


def test_every_build_is_fresh():
    assert build("routes", "resformer") is not build("routes", "resformer")


@pytest.mark.parametrize(
    ("written", "again"),
    [
        ("resformer()", "resformer"),
        ("  resformer\n", "resformer"),
        ("resformer(mode='constant', scale=3)", "resformer(mode='constant', scale=3.0)"),
        ("resformer(mode='constant', scale=-1)", "resformer(mode='constant', scale=-1.0)"),
        ("resformer(mode='identity')", "resformer"),
        ("svformer(anchors=(0, 2))", "svformer(anchors=(0, 2))"),
        ("svformer(anchors=[0, 2])", "svformer(anchors=(0, 2))"),
        ("on_layers(range(2, 8, 2), own)", "on_layers(range(2, 8, 2), own)"),
        ("on_layers(route=own, which=range(2))", "on_layers(range(0, 2), own)"),
        ("neutreno(lam=1e-3)", "neutreno(lam=0.001)"),
    ],
)
def test_an_expression_is_written_in_one_way(written, again):
    assert str(build("routes", written)) == again
    assert str(build("routes", again)) == again


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("resfomer", "resformer"),
        ("svforme", "svformer"),
        ("onlayers", "on_layers"),
        ("NeuTRENO", None),
        ("zzz", None),
    ],
)
def test_an_unknown_name_says_which_there_are(word, meant):
    with pytest.raises(WakefulError, match=f"unknown route '{word}'") as error:
        build("routes", word)
    assert all(name in str(error.value) for name in variants_by_name("routes"))
    assert ("did you mean" in str(error.value)) == (meant is not None)
    assert meant is None or f"did you mean '{meant}'?" in str(error.value)
    assert did_you_mean("resfomer", ["resformer", "own"]) == " (did you mean 'resformer'?)"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("resformer(mod='plus')", r"no option 'mod' \(did you mean 'mode'\?\).*mode, scale, init"),
        ("own(x=1)", "own has no option 'x'; it has no options"),
        ("cla(group='2')", "cla: group must be int, got '2'"),
        ("cla(group=2.0)", "cla: group must be int, got 2.0"),
        ("cla(group=True)", "cla: group must be int, got True"),
        ("cla(group=None)", "cla: group must be int, got None"),
        ("cla(group=own)", "cla: group must be int"),
        ("cla(group=resfomer)", "did you mean 'resformer'"),
        ("neutreno(lam='0.4')", "neutreno: lam must be float"),
        ("neutreno(lam=True)", "neutreno: lam must be float"),
        ("neutreno(lam=1e999)", "neutreno: lam must be finite, got inf"),
        ("cla(2)", "cla: .*cla\\(2\\)"),
        ("cla(group=1, group=2)", "group is given twice"),
        ("then(parts=1)", "then"),
        ("on_layers([1], own, own)", "on_layers"),
        ("on_layers(route=own, which=[True])", "which must be"),
        ("on_layers(route=3, which=[1])", "route must be ValueRoute"),
        ("cla(**{'group': 2})", "no option None"),
        ("then(*[own])", "not a plain value"),
    ],
)
def test_a_wrong_option_is_refused_by_name(expression, message):
    with pytest.raises(WakefulError, match=message):
        build("routes", expression)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "   ",
        "(",
        "resformer(",
        "resformer)",
        "resformer mode",
        "resformer; own",
        "resformer\nown",
        "x = 1",
        "import os",
        "lambda: 1",
        "1",
        "'resformer'",
        "[own]",
        "own + own",
        "own if own else own",
        "own.parts",
        "own[0]",
        "own()()",
        "\x00",
        "own\x00",
        "\ud800",
        "__import__('os')",
        "__import__('os').system('echo')",
        "().__class__.__bases__[0].__subclasses__()",
        "resformer.__init__.__globals__",
        "resformer(mode=__import__('os').name)",
        "resformer(scale=(lambda: 2.0)())",
        "resformer(scale=[x for x in (1,)][0])",
        "resformer(mode=f'{1}')",
        "cla(group=10**9)",
        "cla(group=9**9**9)",
        "eval('own')",
        "open('x')",
        "print(1)",
        "base",
        "__init__",
        "value_route",
        "ResFormer",
        "on_layers(range('x'), own)",
        "on_layers(range(), own)",
        "on_layers(range(1, 2, 0), own)",
        "on_layers(range(1, 2, 3, 4), own)",
        "on_layers(range(stop=3), own)",
        "on_layers(range(999999999999), own)",
        "on_layers(range(True), own)",
    ],
)
def test_anything_else_is_refused_and_never_run(expression):
    with pytest.raises(WakefulError):
        build("routes", expression)


HOSTILE = {
    "nested calls": "then(" * 90 + "own" + ",nonsense)" * 90,
    "nested brackets": "cla(group=" + "[" * 150 + "]" * 150 + ")",
    "more brackets than the parser takes": "(" * 900 + ")" * 900,
    "many signs": "cla(group=" + "-" * 1900 + "1)",
    "many nots": "cla(group=" + "not " * 450 + "1)",
    "a long chain of attributes": "own" + ".x" * 950,
    "a long chain of calls": "own" + "()" * 950,
    "a long sum": "1" + "+1" * 950,
    "a long number": "cla(group=" + "9" * 1900 + ".5)",
    "a long name": "a" * 1_000_000,
    "a long string": "resformer(mode='" + "x" * 5_000_000 + "')",
    "a megabyte of brackets": "(" * 1_000_000,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_expressions_fail_with_one_short_message(what):
    with pytest.raises(WakefulError) as error:
        build("routes", HOSTILE[what])
    assert len(str(error.value)) < 10_000


def test_deep_but_honest_nesting_works():
    assert str(build("routes", "then(" * 20 + "own" + ")" * 20)).count("then") == 20


FOREIGN = '''"""A stranger."""

from pathlib import Path

from wakeful.normalizers import Softmax
from wakeful.routes import ResFormer, ValueRoute

Path(__file__).with_suffix(".imported").touch()


class Stranger(ValueRoute):
    """Does nothing."""

    def __init__(self, *, k: int = 1, word: str = "") -> None:
        super().__init__()
        self.k, self.word = k, word


class Forgetful(ValueRoute):
    """Forgets its option."""

    def __init__(self, *, k: int = 1) -> None:
        super().__init__()


class Heir(ResFormer):
    """ResFormer by another name."""


class Other(Softmax):
    """Not a route."""
'''


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A module outside the package, importable and not imported."""
    (tmp_path / "stranger_module.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "stranger_module.imported"
    sys.modules.pop("stranger_module", None)


def test_a_class_of_ones_own_module_is_a_variant(stranger):
    name = "stranger_module:Stranger"
    route = build("routes", f"{name}(k=3)", imports=True)
    assert str(route) == f"{name}(k=3)"
    both = build("routes", f"then(resformer, on_layers([1, 2], {name}(word='a:b')))")
    assert str(both) == f"then(resformer, on_layers([1, 2], {name}(word='a:b')))"
    assert str(build("routes", "stranger_module:Heir(mode='plus')")) == (
        "stranger_module:Heir(mode='plus')"
    )
    decoder = Decoder(tiny_config(), route=route)
    assert decoder.config.route == f"{name}(k=3)"
    assert decoder.route is not route
    for wrong, said in {
        "Absent": "there is no such class",
        "Path": "must be a subclass of ValueRoute",
        "Other": "must be a subclass of ValueRoute",
        "Stranger(j=1)": "stranger_module:Stranger has no option 'j'; its options are k, word",
        "Stranger(k='a')": "stranger_module:Stranger: k must be int",
        "Stranger(1)": "stranger_module:Stranger: too many positional",
        "Stranger.attach": "stranger_module:Stranger.attach",
    }.items():
        with pytest.raises(WakefulError, match=said):
            build("routes", f"stranger_module:{wrong}", imports=True)
    with pytest.raises(WakefulError, match="Forgetful has no attribute 'k'"):
        str(build("routes", "stranger_module:Forgetful"))


def test_no_module_is_imported_because_a_file_names_it(stranger, monkeypatch):
    expression = "then(resformer, stranger_module:Stranger)"
    for attempt in (
        lambda: build("routes", expression),
        lambda: Decoder(tiny_config(route=expression)),
        lambda: WakefulForCausalLM(WakefulConfig.of(tiny_config(route=expression))),
    ):
        with pytest.raises(WakefulError, match="add --import stranger_module"):
            attempt()
    assert not stranger.exists()
    monkeypatch.setenv("WAKEFUL_IMPORT", "another,stranger_module")
    assert str(Decoder(tiny_config(route=expression)).route) == expression
    assert stranger.exists()


def test_what_a_user_starts_is_imported(stranger):
    admit(tiny_config(route="stranger_module:Stranger"))
    assert stranger.exists()
    with pytest.raises(WakefulError, match="the module not_there cannot be imported"):
        admit(tiny_config(route="not_there:Stranger"))


def test_objects_are_as_good_as_expressions():
    route, normalizer = ResFormer(mode="learnable"), Softmax1(learned=True)
    options = {
        "route": route,
        "depth": DenseFormer(),
        "normalizer": normalizer,
        "norm": RMSNormSingle(),
        "placement": Mixed(share=0.5),
        "rope": Linear(factor=2.0),
    }
    one, two = (Decoder(tiny_config(), **options) for _ in range(2))
    assert one.config == tiny_config(
        route="resformer(mode='learnable')",
        depth="denseformer",
        normalizer="softmax1(learned=True)",
        norm="rmsnorm_single",
        placement="mixed(share=0.5)",
        rope="linear(factor=2.0)",
    )
    assert one.route is not two.route
    assert not {id(p) for p in one.parameters()} & {id(p) for p in two.parameters()}
    with pytest.raises(WakefulError, match="unknown route 'softmax1'"):
        Decoder(tiny_config(), route=normalizer)
    with pytest.raises(WakefulError, match="neither an expression nor a variant"):
        Decoder(tiny_config(), route=3)

    class Local(ResFormer):
        """Not to be found again."""

    with pytest.raises(WakefulError, match="cannot be written down and read again"):
        Decoder(tiny_config(), route=Local())


def test_a_file_put_in_the_folder_is_a_variant_and_one_taken_out_is_none(tmp_path, monkeypatch):
    """The folder is the registry."""
    package = importlib.import_module("wakeful.routes")
    (tmp_path / "doubled.py").write_text(
        '"""Twice."""\n\nfrom wakeful.routes.base import ValueRoute\n\n\n'
        'class Doubled(ValueRoute):\n    """U_n = 2 A_n V_n."""\n\n    examples = ("doubled",)\n\n'
        "    def correct(self, layer, x, u, v, memory):\n        return 2 * u\n"
    )
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    variants_by_name.cache_clear()
    try:
        assert "doubled" in variants_by_name("routes")
        route = build("routes", "then(doubled, own)")
        assert str(route) == "then(doubled, own)"
        u = torch.ones(1, 1, 1, 1)
        assert route.parts[0].correct(0, u, u, u, {}).item() == 2
    finally:
        monkeypatch.undo()
        sys.modules.pop("wakeful.routes.doubled", None)
        variants_by_name.cache_clear()
    assert "doubled" not in variants_by_name("routes")
    assert isinstance(build("routes", "svformer"), SVFormer)
