"""Advice is what was tried on the text: the loss first, then the sink, then the outliers."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import wakeful
from surgery.test_prefix import decoder, text
from verbs.test_diagnose import llama  # noqa: F401
from wakeful.diagnosis import advice
from wakeful.diagnosis.advice import Trial, advise, measure_trial
from wakeful.diagnosis.later_sinks import LaterSink
from wakeful.diagnosis.measure import ModelDiagnosis
from wakeful.diagnosis.sink_choice import choose_prefix
from wakeful.errors import WakefulError
from wakeful.loading.model import Model
from wakeful.surgery import SinkTrial, rotate
from wakeful.surgery.rotate import turning_of

NONE, LARGE = ((2.0, 2.0 + more) for more in (0.0, 0.7))
SINK = (LaterSink(name="x", share=0.5, mass=0.5, even=0.0),)
SICK = Trial(losses=(2.0, 2.0), share=0.6, mass=0.6, kurtosis=400.0, turned_kurtosis=3.0)
TEXT = "The quick brown fox jumps over the lazy dog; the dog sleeps on. " * 20


def trial(option: str, losses: tuple[float, ...], share: float, kurtosis: float = 3.0) -> Trial:
    return Trial(
        cure=f"try {option}", options=(option,), losses=losses, share=share, mass=share,
        kurtosis=kurtosis,
    )  # fmt: skip


CASES = {
    "the prefix, where it helps": (
        trial("--prefix", NONE, 0.01), trial("--sinks", NONE, 0.01), None, "--prefix"),
    "sinks, where the prefix costs": (
        trial("--prefix", LARGE, 0.01), trial("--sinks", NONE, 0.01), None, "--sinks"),
    "sinks, where the prefix leaves the sink": (
        trial("--prefix", NONE, 0.5), trial("--sinks", NONE, 0.01), None, "--sinks"),
    "sinks, where a later sink stays": (
        dataclasses.replace(trial("--prefix", NONE, 0.01), later=SINK),
        trial("--sinks", NONE, 0.01), None, "--sinks"),
    "the outliers alone, where the sink stays": (
        trial("--prefix", LARGE, 0.01), None, trial("--rotate", NONE, 0.5, 3.0), "--rotate"),
    "nothing, where nothing helps": (
        trial("--prefix", LARGE, 0.01), trial("--sinks", LARGE, 0.01), None, ""),
}  # fmt: skip


@pytest.fixture
def sick(llama: Path, tmp_path: Path) -> tuple[Model, ModelDiagnosis, list[list[int]]]:  # noqa: F811
    path = tmp_path / "words.txt"
    path.write_text(TEXT, "utf-8")
    model = wakeful.load(llama)
    read = {"text": str(path), "length": 16, "num_sequences": 4, "no_advice": True}
    (found,) = wakeful.diagnose(model, **read).models
    assert found.advice is None
    tokens = model.encode_plain(TEXT)
    return model, found, [tokens[n : n + 16] for n in (0, 16, 32, 48)]


@pytest.mark.parametrize("case", CASES)
def test_what_helps_at_no_loss_is_advised(
    case: str, sick: tuple[Model, ModelDiagnosis, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, sinks, rotation, expected = CASES[case]
    model, found, rows = sick
    given: dict[str, Callable[..., object]] = {
        "try_prefix": lambda _: prefix, "try_sinks": lambda _: sinks,
        "try_rotation": lambda _: rotation,
    }  # fmt: skip
    for name, measured in given.items():
        monkeypatch.setattr(advice._CureTrials, name, measured)
    monkeypatch.setattr(advice, "measure_trial", lambda *_, **__: SICK)
    assert advise(model, dataclasses.replace(found, later_sinks=()), rows) is None
    told = advise(model, dataclasses.replace(found, later_sinks=SINK), rows)
    assert told is not None
    assert told.arguments == expected
    assert "kurtosis from 400.0 to 3.0" in told.words
    assert ("a sink that no cure removes" in told.words) == (expected in ("", "--rotate"))


@pytest.mark.parametrize("name", ["x", "y"])
def test_the_first_sink_is_removed_where_a_later_one_was_there_before(
    name: str, sick: tuple[Model, ModelDiagnosis, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2's " the" takes a tenth of the attention with a stored BOS and without."""
    model, found, rows = sick
    prefix = trial("--rotate hadamard --prefix auto", NONE, 0.01)
    later = (dataclasses.replace(SINK[0], name=name),)
    given: dict[str, Callable[..., object]] = {
        "try_prefix": lambda _: dataclasses.replace(prefix, later=later),
        "try_sinks": lambda _: None,
        "try_rotation": lambda _: trial("--rotate", NONE, 0.5),
    }  # fmt: skip
    for part, measured in given.items():
        monkeypatch.setattr(advice._CureTrials, part, measured)
    monkeypatch.setattr(
        advice, "measure_trial", lambda *_, **__: dataclasses.replace(SICK, later=SINK)
    )
    told = advise(model, dataclasses.replace(found, later_sinks=SINK), rows)
    assert told is not None
    assert told.arguments == (prefix.options[0] if name == "x" else "--rotate")
    assert told.words.endswith("a sink is left: x. No cure removes it") == (name == "x")


@pytest.mark.slow
def test_what_cannot_be_cured_says_why(
    sick: tuple[Model, ModelDiagnosis, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found, rows = sick
    ill = dataclasses.replace(found, later_sinks=SINK)

    def refuse(_: Model) -> None:
        raise WakefulError("its part is unknown")

    with monkeypatch.context() as patch:
        patch.setattr(Model, "decoder", refuse)
        told = advise(model, ill, rows)
    assert told is not None
    assert (told.arguments, "its part is unknown" in told.words) == ("", True)
    small = wakeful.quantize(model, "fine", text=TEXT[:0] or "python-stdlib", length=16).model
    told = advise(small, ill, rows)
    assert told is not None
    assert told.words.endswith("is quantized: cure the model that it was made from")


@pytest.mark.slow
def test_a_model_with_a_sink_is_advised_a_cure_that_works(
    sick: tuple[Model, ModelDiagnosis, list[list[int]]],
) -> None:
    """What is tried is what the command does, to the figures."""
    model, found, rows = sick
    tried = advice._CureTrials(model, model.decoder(), torch.tensor(rows), "auto")
    for made in (tried.try_prefix(), tried.try_sinks(), tried.try_rotation()):
        assert made is not None
        assert made.loss_change(tried.uncured).windows == 4
    rotation = tried.try_rotation()
    assert rotation is not None
    turned = rotate(model.decoder(), "hadamard")
    look = measure_trial(turned, torch.tensor(rows))
    assert (rotation.share, rotation.kurtosis) == pytest.approx(
        (look.share, look.kurtosis), rel=1e-3
    )
    told = advise(model, dataclasses.replace(found, later_sinks=SINK), rows)
    assert told is not None
    assert "on 4 windows" in told.words.lower() or "on 8 windows" in told.words.lower()


@pytest.mark.parametrize("costs", [0.0, 1.0])
def test_bos_settles_the_choice_where_it_costs_nothing(
    costs: float, sick: tuple[Model, ModelDiagnosis, list[list[int]]]
) -> None:
    """Otherwise the other candidates are measured; what is known is not measured again."""
    model, _, rows = sick
    windows = torch.tensor(rows)
    bos = model.bos
    assert bos is not None
    losses = (9.0, 9.1, 9.2, 9.3)  # more than any token's
    known = [
        SinkTrial((), losses, 0.6, 0.6),
        SinkTrial((bos,), tuple(loss + costs for loss in losses), 0.0, 0.0),
    ]
    found = choose_prefix(model, model.decoder(), windows, known=known)
    assert found.trials[:2] == tuple(known)
    if costs:
        assert len(found.trials) > 2
        assert found.best not in known
    else:
        assert (found.best, found.trials) == (known[1], tuple(known))


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_turned_states_are_those_of_the_rotated_model(norm: str) -> None:
    model = decoder(norm=norm)
    expected = measure_trial(rotate(model, "hadamard"), text())
    look = measure_trial(model, text(), turn=turning_of(model))
    figures = (look.share, look.turned_kurtosis)
    assert figures == pytest.approx((expected.share, expected.kurtosis), rel=1e-9)
    assert look.kurtosis != pytest.approx(expected.kurtosis, rel=1e-3)
