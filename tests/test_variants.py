"""Expressions: what they build, and that nothing in them is ever run."""

import importlib
import sys

import pytest
import torch

from helpers import FIELD
from wakeful.errors import WakefulError
from wakeful.routes.base import OnLayers, Then
from wakeful.routes.resformer import ResFormer
from wakeful.routes.svformer import SVFormer
from wakeful.variants import build, catalogue, nearest, variants

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
    with pytest.raises(WakefulError, match=f"unknown routes variant '{word}'") as error:
        build("routes", word)
    assert all(name in str(error.value) for name in variants("routes"))
    assert ("did you mean" in str(error.value)) == (meant is not None)
    assert meant is None or f"did you mean '{meant}'?" in str(error.value)
    assert nearest("resfomer", ["resformer", "own"]) == " (did you mean 'resformer'?)"


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
        ("dense(learned=0)", "dense: learned must be bool"),
        ("cla(2)", "cla: .*cla\\(2\\)"),
        ("cla(group=1, group=2)", "group is given twice"),
        ("then(parts=1)", "then"),
        ("on_layers([1], own, own)", "on_layers"),
        ("on_layers(route=own, which=[True])", "which must be"),
        ("on_layers(route=3, which=[1])", "route must be ValueRoute"),
        ("cla(**{'group': 2})", "no option None"),
        ("then(*[own])", "no plain value"),
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


@pytest.mark.parametrize("folder", FIELD)
def test_a_catalogue_shows_how_to_write_each(folder):
    for entry in catalogue(folder):
        assert entry.summary
        assert ":" not in entry.signature.replace("'", "")
    entries = {entry.name: entry for entry in catalogue("routes")}
    assert entries["cla"].signature == "group=2"
    assert entries["on_layers"].signature == "which, route"
    assert entries["then"].signature == "*parts"


def test_a_file_put_in_the_folder_is_a_variant_and_one_taken_out_is_none(tmp_path, monkeypatch):
    """The folder is the registry."""
    package = importlib.import_module("wakeful.routes")
    (tmp_path / "doubled.py").write_text(
        '"""Twice."""\n\nfrom wakeful.routes.base import ValueRoute\n\n\n'
        'class Doubled(ValueRoute):\n    """U_n = 2 A_n V_n."""\n\n    examples = ("doubled",)\n\n'
        "    def correct(self, layer, x, u, v, memory):\n        return 2 * u\n"
    )
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    variants.cache_clear()
    try:
        assert "doubled" in variants("routes")
        route = build("routes", "then(doubled, own)")
        assert str(route) == "then(doubled, own)"
        u = torch.ones(1, 1, 1, 1)
        assert route.parts[0].correct(0, u, u, u, {}).item() == 2
    finally:
        monkeypatch.undo()
        sys.modules.pop("wakeful.routes.doubled", None)
        variants.cache_clear()
    assert "doubled" not in variants("routes")
    assert isinstance(build("routes", "svformer"), SVFormer)
