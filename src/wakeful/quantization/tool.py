"""The verb quantize: models and schemes in; smaller ones, and the damage done to a text, out."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from wakeful.config.keywords import accept_options, options_from
from wakeful.config.reading import LENGTH
from wakeful.data.tokenizer import Tokenizer
from wakeful.device import synchronize
from wakeful.errors import WakefulError
from wakeful.estimates import INTERVAL
from wakeful.hf.checkpoint_reader import Shards
from wakeful.hf.gguf_out import check_gguf, gguf_bytes
from wakeful.hf.weights_out import refuse_existing
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.reading import EvaluationData, as_evaluation_data, open_evaluation_data
from wakeful.loading.session import Session, choose_data, describe_bos, note_duration, open_session
from wakeful.loading.sources import Source, convert_to_decoder, dtype_name, source_name
from wakeful.probes.running import as_decoder
from wakeful.quantization.cache import calibrate_cache, check_cache, with_cache
from wakeful.quantization.compressed import (
    can_compress,
    check_compressed,
    compressed_config,
    state_bytes,
)
from wakeful.quantization.convert import (
    by_scheme,
    linear_layers,
    prepare_model,
    quantize_module,
    quantized_layers,
    scheme_of,
)
from wakeful.quantization.damage import Damage
from wakeful.quantization.durations import forward_seconds, rounding_seconds
from wakeful.quantization.formats import fits, format_bytes
from wakeful.quantization.gguf_file import tables_of
from wakeful.quantization.measure import measure_damage
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.result import Quantization, QuantizationMatrix
from wakeful.quantization.schemes import NAMED, SCHEMES, Absmax, ScaleKind, Scheme, parse_scheme
from wakeful.quantization.schemes.grids import E4M3
from wakeful.quantization.sensitivity import LayerCost, measure_layer_costs
from wakeful.quantization.smallest import MIXED, Budget, SmallestSearch, split_text
from wakeful.quantization.smallest_report import method_words
from wakeful.quantization.targets import TARGETS, Target
from wakeful.quantization.tuning import sequences_per_step
from wakeful.runs.run import Environment
from wakeful.switches import default_torch_state
from wakeful.terminal.display import Display, DisplayFactory


@overload
def quantize(model: Source, *schemes: str | Scheme, **kwargs: Any) -> Quantization: ...
@overload
def quantize(
    model: list[Any] | tuple[Any, ...], *schemes: str | Scheme, **kwargs: Any
) -> QuantizationMatrix: ...
@accept_options(QuantizeOptions)
@default_torch_state()
def quantize(
    model: Source | list[Any] | tuple[Any, ...],
    *schemes: str | Scheme,
    tokenizer: AnyTokenizer | str | Path | None = None,
    display: DisplayFactory | None = None,
    options: QuantizeOptions | None = None,
    **kwargs: Any,
) -> Quantization | QuantizationMatrix:
    """Quantize models' linear layers and caches, and measure on a text what that costs.

        small = wakeful.quantize("smollm2", "coarse").model
        wakeful.quantize("smollm2", "fine", "w4", text="book.txt")
        wakeful.quantize(["smollm2", "cured"], "coarse", "w4g128_gptq", "nvfp4", text="book.txt")

    The models themselves stay as they are. One without `text`, `out` or `sensitivity` is not
    measured.

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory; or several of
            them in a list, which are measured one after another and make one matrix.
        schemes: as `QuantizeOptions.scheme`, or schemes themselves.
        tokenizer: of a module in memory.
        display: shows progress; None is a bar where there is a terminal.
        options: `QuantizeOptions`, whose fields are keyword arguments too.

    With `out` the run directory is written, with `save` the model as compressed-tensors; neither
    may exist. A scheme that the format lacks is measured only.

    Raises:
        WakefulError: a model, a scheme or the text cannot be read, a scheme does not fit a layer's
            width or needs a text to calibrate on, `save` is asked for what compressed-tensors
            lacks, or `out` or `save` exists. What was measured of the models before is written to
            `out`.
    """
    if schemes:
        if "scheme" in kwargs:
            raise WakefulError(f"scheme = {kwargs['scheme']!r} and {schemes!r}: give one of them")
        kwargs["scheme"] = tuple(
            each.expression if isinstance(each, Scheme) else each for each in schemes
        )
    models = list(model) if isinstance(model, list | tuple) else [model]
    options = options_from(QuantizeOptions, kwargs, options)
    several = isinstance(model, list | tuple)
    target = _target(options) if options.chooses else None
    if target is None:
        measured_schemes = chosen_schemes(options.scheme or tuple(SCHEMES), options.scales)
    else:
        measured_schemes = list(target.schemes.values())
    pairs = (pair.partition("=") for pair in options.others)
    others = {pattern: parse_scheme(scheme, imports=True) for pattern, _, scheme in pairs}
    measures = bool(
        options.text or options.out or several or options.sensitivity or options.chooses
    )
    calibrates = options.chooses or any(
        scheme.calibrated for scheme in (*measured_schemes, *others.values())
    )
    texts = options.calibration_text
    if texts and not calibrates:
        raise WakefulError(f"calibration_text = {texts!r}: no scheme here calibrates; leave it out")
    with open_session("quantize", options, models, tokenizer, display) as tool_session:
        _check(options, measured_schemes, len(models))
        length = options.length or LENGTH
        counts = _Counts(
            options.num_sequences if measures else 0,
            options.calibration_sequences if calibrates else 0,
            options.tune * sequences_per_step(length),
        )
        following = 0 if texts else counts.calibration + counts.tuning
        data = as_evaluation_data("")
        if counts.measured + following:
            data = open_evaluation_data(options.source, length * (counts.measured + following))
        calibration = [open_evaluation_data(text, length * (counts.calibration + counts.tuning))
                       for text in texts]  # fmt: skip
        quantizer = _Quantizer(
            tool_session.models(),
            options,
            measured_schemes,
            others,
            data,
            counts,
            calibration,
            tool_session,
            target,
        )
        if several:
            return _matrix(quantizer.next, models or [""], options)
        result = quantizer.next(models[0])
        try:
            if options.save:
                result = replace(result, saved=result.save_model(options.save))
        finally:  # what was measured is written even where the model cannot be
            if options.out:
                result.save(options.out)
    return result


def _matrix(
    measure: Callable[[Source], Quantization], models: Sequence[Source], options: QuantizeOptions
) -> QuantizationMatrix:
    """Measure models in turn; where one fails, what is known of those before it is written."""
    results: dict[str, Quantization] = {}

    def save_results() -> QuantizationMatrix:
        matrix = QuantizationMatrix(results=results, figures=options.figures)
        if options.out and results:
            matrix.save(options.out)
        return matrix

    try:
        for source in models:
            result = measure(source)
            results[result._measured.measurement.name] = replace(result, models={})
    except BaseException as error:
        save_results()
        if not (results and options.out and isinstance(error, WakefulError)):
            raise
        where = f"what was measured of {', '.join(results)} is in {options.out}"
        raise WakefulError(f"{error}; {where}") from None
    return save_results()


@dataclass(frozen=True)
class _Counts:
    """Numbers of sequences."""

    measured: int
    calibration: int
    tuning: int


@dataclass
class _Quantizer:
    """One call of the tool, which quantizes and measures models in turn."""

    loading: Iterator[Model]
    options: QuantizeOptions
    schemes: Sequence[Scheme]
    others: Mapping[str, Scheme]
    """The schemes of layers that have one of their own, by pattern."""
    data: EvaluationData
    counts: _Counts
    calibration: Sequence[EvaluationData]
    """Texts to calibrate on; none where these sequences follow the measured ones."""
    session: Session
    target: Target | None
    """Formats to choose among, where each layer's is chosen."""

    def next(self, source: Source) -> Quantization:
        """Load the next model, quantize it, and measure it; let go of it."""
        loaded, options = self._load(), self.options
        plain = prepare_model(loaded.module, options.skip)
        layers = self._layers(plain)
        if options.cache or any(scheme.cache is not None for scheme in self.schemes):
            check_cache(loaded.module)
        if options.save and not self._for_llama_cpp:
            check_compressed(plain, self._schemes_of(layers), layers, _written(loaded))
        length = options.length_for(loaded.context)
        source_text = choose_data(loaded, options, self.data)
        tokens = self._tokens(loaded, source_text, length)
        measured = tokens[: self.counts.measured]
        calibration = tokens[self.counts.measured :][: self.counts.calibration]
        search = None
        if self.target is not None:
            tuning = tokens[self.counts.measured + self.counts.calibration :]
            search = self._search(loaded, self.target, plain, layers, calibration, tuning)
            search.check()
        self._note_duration(loaded, layers, tokens, search)
        forms, seconds = dict[str, Model](), dict[str, float]()
        named = {str(scheme): scheme for scheme in self.schemes}
        start, smallest = time.perf_counter(), None
        if search is not None:
            smallest = search.find()
            if options.cache:
                _quantize_caches(smallest.modules.values(), options.cache, calibration)
            synchronize(loaded.device)
            named = smallest.schemes
            forms = {name: _form(loaded, name, module, name)
                     for name, module in smallest.modules.items()}  # fmt: skip
            seconds = dict.fromkeys(forms, time.perf_counter() - start)
        else:
            for name, scheme in named.items():
                forms[name] = self._quantized(loaded, name, scheme, calibration)
                synchronize(loaded.device)
                seconds[name] = time.perf_counter() - start
                start = time.perf_counter()
        layer_costs = self._costs(loaded, forms, measured) if options.sensitivity else []
        damage = None
        if measured:
            damage = _damage(loaded, forms, named, seconds, measured, self.session.show)
            damage = replace(damage, savable=self._savable(loaded, plain, layers))
            damage = damage if smallest is None else replace(damage, bytes=smallest.bytes)
        machine, head, text = self.session.machine, _head(plain), source_text.name or options.source
        method = _method(
            loaded, options, text, len(layers), length, self.counts.calibration, machine
        )
        if smallest is not None:
            method["Formats"] = method_words(smallest, len(calibration))
        return Quantization(
            models=forms if smallest is None else {MIXED: forms[MIXED]},
            source=source_name(source), damage=damage, method=method,
            layers=tuple(layers), options=options,
            head=any(layer is head for layer in layers.values()), machine=machine,
            figures=options.figures, costs=tuple(layer_costs), smallest=smallest,
        )  # fmt: skip

    @property
    def _for_llama_cpp(self) -> bool:
        return self.target is not None and self.target.tables

    def _load(self) -> Model:
        """Load the next model, as a decoder where a GGUF file is asked for.

        Raises:
            WakefulError: it is quantized already, or no such file can hold it.
        """
        loaded = next(self.loading)
        if loaded.is_quantized:
            raise WakefulError(
                f"{loaded.name} is quantized already: name the model that it was made from"
            )
        if self._for_llama_cpp:
            loaded = convert_to_decoder(loaded, self.session.show)
            check_gguf(loaded.decoder(), loaded.wakeful_tokenizer)
        return loaded

    def _layers(self, plain: nn.Module) -> dict[str, nn.Module]:
        """Return the layers to quantize; --bits counts the head apart, which then stays."""
        if all(scheme.weights is None for scheme in self.schemes):
            return {}
        layers = linear_layers(plain, self.options.skip)
        if self.options.bits and not self._for_llama_cpp:
            head = _head(plain)
            layers = {name: layer for name, layer in layers.items() if layer is not head}
        return layers

    def _costs(
        self, loaded: Model, forms: Mapping[str, Model], measured: Sequence[Tensor]
    ) -> list[LayerCost]:
        """Return what each layer costs alone."""
        small = next(iter(forms.values())).module
        label, count = f"{loaded.name}: layers alone", len(quantized_layers(small))
        return measure_layer_costs(
            loaded.module, small, measured,
            progress=lambda done: self.session.show.count(label, done, count),
        )  # fmt: skip

    def _search(
        self, loaded: Model, target: Target, plain: nn.Module, layers: Mapping[str, nn.Module],
        calibration: Sequence[Tensor], tuning: Sequence[Tensor],
    ) -> SmallestSearch:  # fmt: skip
        """Return the search for the smallest model within the budget."""
        options, count, name = self.options, self.session.show.count, loaded.name
        stored, decoder = loaded.export_dtype, as_decoder(plain)
        tables, all_bytes = {}, state_bytes(plain, loaded.stored)
        if target.tables and decoder is not None:
            tables, stored = tables_of(decoder), torch.float16
            all_bytes = gguf_bytes(decoder)
        return SmallestSearch(
            plain, layers, Budget(options.bits, options.bytes, options.loss),
            *split_text(calibration), all_bytes=all_bytes, stored=stored, target=target,
            tables=tables, arithmetic=options.arithmetic, tune=options.tune, tuning_text=tuning,
            tuning_state=Path(options.tuning_state) if options.tuning_state else None,
            on_rounding=partial(count, f"{name}: layers in all formats"),
            on_tuning=partial(count, f"{name}: steps of tuning"),
        )  # fmt: skip

    def _schemes_of(self, layers: Mapping[str, nn.Module]) -> dict[str, Scheme]:
        """Return the scheme of each layer to save; any of the formats where they are chosen."""
        if not layers:
            return {}
        if self.target is not None:
            return {
                name: next(scheme for scheme in self.schemes if fits(layer, scheme))
                for name, layer in layers.items()
            }
        parts = by_scheme(layers, self.schemes[0], self.others)
        return {name: scheme for scheme, part in parts.items() for name in part}

    def _savable(
        self, loaded: Model, plain: nn.Module, layers: Mapping[str, nn.Module]
    ) -> tuple[str, ...]:
        """Return the schemes under which the model can be saved: those asked for, and w8a8."""
        schemes = {} if self.others else {str(scheme): scheme for scheme in self.schemes}
        return tuple(
            name for name, scheme in {**schemes, "w8a8": NAMED["w8a8"]}.items()
            if layers and can_compress(plain, scheme, layers, lambda: _written(loaded))
        )  # fmt: skip

    def _tokens(self, loaded: Model, measured_text: EvaluationData, length: int) -> list[Tensor]:
        """Return sequences to measure, then those to calibrate on, then those to tune on."""
        bos, counts, texts = loaded.starts_with_bos(self.options.bos), self.counts, self.calibration
        following = counts.calibration + counts.tuning

        def read(measured_text: EvaluationData, number: int) -> list[list[int]]:
            if not number:
                return []
            return measured_text.sequences(loaded, length=length, num_sequences=number, bos=bos)

        if not texts:
            sequences = read(measured_text, counts.measured + following)
        else:
            shares = [
                [len(range(index, number, len(texts))) for index in range(len(texts))]
                for number in (counts.calibration, counts.tuning)
            ]
            parts = [read(text, sum(both)) for text, *both in zip(texts, *shares, strict=True)]
            calibration = [part[:number] for part, number in zip(parts, shares[0], strict=True)]
            tuning = [part[number:] for part, number in zip(parts, shares[0], strict=True)]
            sequences = read(measured_text, counts.measured)
            if any(tokens in sequences for part in parts for tokens in part):
                raise WakefulError(
                    "calibration_text begins with the sequences that are measured: name another "
                    "text, or leave it out"
                )
            sequences += chain.from_iterable(calibration)
            # A step of tuning reads texts in turn.
            turns = chain.from_iterable(zip_longest(*tuning))
            sequences += [tokens for tokens in turns if tokens is not None]
        return [torch.tensor([tokens], device=loaded.device) for tokens in sequences]

    def _note_duration(
        self, loaded: Model, layers: Mapping[str, nn.Module], tokens: Sequence[Tensor],
        search: SmallestSearch | None,
    ) -> None:  # fmt: skip
        """Show how long quantizing and measuring may take, in forwards of a sequence."""
        counts, number, seconds = self.counts, len(self.schemes), 0.0
        if not counts.measured:
            return
        if search is None:  # calibration text is read for each scheme that wants it
            forwards = counts.calibration * sum(
                1.0 if scheme.method is None else scheme.method.passes(counts.calibration)
                for scheme in self.schemes if scheme.calibrated
            )  # fmt: skip
        else:  # formats are calibrated together; every fourth sequence scores and compares them
            choosing = len(search.choosing_text)
            forwards = 3 * (counts.calibration - choosing) + (3 + number + 3) * choosing
            forwards += 4 * counts.tuning  # the model, and the small one forward and back
            seconds, number = (
                rounding_seconds(layers, search.target.schemes),
                1 + len(search.compared),
            )
        # Measuring reads each sequence once, and every layer alone beside its quantized forms; a
        # layer that is exchanged alone is read from its block on: half of the model.
        forwards += 2 * (1 + number) * counts.measured
        forwards += len(layers) / 2 * counts.measured if self.options.sensitivity else 0
        note_duration(
            self.session.show, f"{loaded.name}: sequences", loaded, tokens=tokens[0].shape[1],
            total=counts.measured, passes=forwards / counts.measured, seconds=seconds,
            forward=forward_seconds(loaded.module, tokens[0]),
        )  # fmt: skip

    def _quantized(
        self, loaded: Model, name: str, scheme: Scheme, calibration: list[Tensor]
    ) -> Model:
        self.session.show.note(f"quantizing {loaded.name}: {name}")
        others = self.others
        calibrates = any(layer_scheme.calibrated for layer_scheme in (scheme, *others.values()))
        module = quantize_module(
            loaded.module, scheme, arithmetic=self.options.arithmetic,
            calibration=calibration if calibrates else (),
            skip=() if scheme.weights is None else self.options.skip, others=others,
            passed=partial(self.session.show.count, f"{loaded.name} {name}: layers"),
        )  # fmt: skip
        return _form(loaded, name, module, str(scheme))


def _target(options: QuantizeOptions) -> Target:
    """Return the formats to choose among.

    Raises:
        WakefulError: the engine's file has no place for a scheme.
    """
    target = TARGETS[options.for_]
    if target.tables and options.cache:
        raise WakefulError("--cache is of --for vllm: llama.cpp chooses its cache when it runs")
    if target.tables and options.scheme:
        raise WakefulError("--scheme gives the formats of --for vllm; llama.cpp has its own")
    if not options.scheme:
        return target
    schemes = chosen_schemes(options.scheme, options.scales)
    for scheme in schemes:
        compressed_config({scheme: ()})
    ordered = sorted(schemes, key=lambda scheme: format_bytes(scheme, 1, 128 * 128))
    return replace(target, schemes={str(scheme): scheme for scheme in ordered})


def _quantize_caches(
    modules: Iterable[nn.Module], name: str, calibration: Sequence[Tensor]
) -> None:
    """Let models of chosen formats, changed in place, read keys and values in 8 bits."""
    grid = E4M3(per="tensor") if name == "fp8" else Absmax(bits=8, per="tensor")
    for module in modules:
        scheme = scheme_of(module)
        assert scheme is not None
        calibrate_cache(with_cache(module, replace(scheme, cache=grid)), calibration)


def _form(loaded: Model, name: str, module: nn.Module, scheme: str) -> Model:
    """Return a model's quantized form."""
    return replace(
        loaded, name=f"{loaded.name} {name}", module=module, path=None,
        architecture=f"{loaded.architecture}, {scheme}",
    )  # fmt: skip


def _written(loaded: Model) -> Tokenizer | None:
    """Return the tokenizer that is written beside a decoder; None where it is Transformers' own."""
    return None if as_decoder(loaded.module) is None else loaded.wakeful_tokenizer


def _head(model: nn.Module) -> nn.Module | None:
    decoder = as_decoder(model)
    if decoder is not None:
        return decoder.head
    find: Callable[[], nn.Module] | None = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def chosen_schemes(names: Sequence[str], scales: Sequence[ScaleKind]) -> list[Scheme]:
    """Return each scheme under each kind of scales; one that cannot be static is dynamic only.

    One whose expression says static is static only. Modules that expressions name are imported.

    Raises:
        WakefulError: a scheme is named twice, or only static scales are asked of one that has none.
    """
    schemes: list[Scheme] = []
    for name in names:
        scheme = parse_scheme(name, imports=True)
        for kind in scales if scheme.scales == "dynamic" else ("static",):
            if kind == "static" and "dynamic" in scales and not scheme.can_be_static:
                continue
            variant = scheme.with_scales(kind)
            if variant in schemes:
                raise WakefulError(f"scheme {variant} is named twice")
            schemes.append(variant)
    return schemes


def _check(options: QuantizeOptions, schemes: Sequence[Scheme], models: int) -> None:
    if options.chooses and models > 1:
        raise WakefulError(f"--bits, --bytes and --loss are of one model, and {models} are named")
    if options.sensitivity and (len(schemes) > 1 or schemes[0].weights is None or models > 1):
        raise WakefulError(
            "--sensitivity ranks the layers of one model under one scheme of weights, such as "
            "--scheme w4a16"
        )
    if options.skip and all(scheme.weights is None for scheme in schemes):
        raise WakefulError(
            f"{' and '.join(map(str, schemes))} quantize the cache alone: there is nothing to "
            f"--skip"
        )
    if not options.save:
        return
    if models > 1:
        raise WakefulError(f"--save writes one model, and {models} are named")
    if len(schemes) > 1 and not options.chooses:
        raise WakefulError(
            f"--save writes one model, and {len(schemes)} schemes are asked for: name one with "
            "--scheme"
        )
    if options.for_ == "llama.cpp":
        if Path(options.save).suffix not in (".gguf", ".txt"):
            raise WakefulError(
                f"--save {options.save}: for llama.cpp it is NAME.gguf, or NAME.txt for the flags "
                "of llama-quantize"
            )
    else:
        compressed_config({schemes[0]: ()})
    saved, out = Path(options.save).resolve(), Path(options.out).resolve()
    if options.out and (saved.is_relative_to(out) or out.is_relative_to(saved)):
        raise WakefulError(
            f"--save {options.save} and --out {options.out} are one folder or one inside the "
            "other: name two"
        )
    refuse_existing(Path(options.save))


def _damage(
    loaded: Model,
    forms: Mapping[str, Model],
    schemes: dict[str, Scheme],
    seconds: dict[str, float],
    sequences: list[Tensor],
    show: Display,
) -> Damage:
    name = f"{loaded.name}: sequences"
    total = len(sequences)
    show.count(name, 0, total)
    measurement = measure_damage(
        loaded.name,
        loaded.module,
        {scheme: form.module for scheme, form in forms.items()},
        sequences,
        progress=lambda done: show.count(name, done, total),
    )
    full = _bytes_before(loaded)
    sizes = {scheme: state_bytes(form.module, form.stored) for scheme, form in forms.items()}
    count = sum(parameter.numel() for parameter in loaded.module.parameters())
    return Damage(measurement, schemes, full, sizes, seconds, count)


def _bytes_before(loaded: Model) -> int:
    """Return the bytes of the files a model was read from; without those, what writing it takes."""
    path = loaded.path
    if path is not None and path.is_file():
        return path.stat().st_size
    if path is not None and (path / "config.json").is_file():
        with Shards(path) as tensors:
            return tensors.num_bytes
    return state_bytes(loaded.module, loaded.stored)


def _method(
    loaded: Model,
    options: QuantizeOptions,
    text: str,
    layers: int,
    length: int,
    calibration: int,
    machine: Environment,
) -> dict[str, str]:
    texts = " and ".join(options.calibration_text)
    where = f"sequences from the beginning of {texts}" if texts else "further sequences"
    skipped = f", and what matches {', '.join(options.skip)}" if options.skip else ""
    others = f"; of a scheme of their own: {', '.join(options.others)}" if options.others else ""
    return {
        "Model": f"{loaded.name} ({loaded.architecture})",
        "Layers": f"{layers} linear layers; embeddings, norms and a head tied to an embedding stay"
        + skipped
        + others
        if layers
        else "none: keys and values are rounded as attention reads them",
        "Text": f"{text}, {options.num_sequences} sequences of {length} tokens from its "
        "beginning, the same for every scheme",
        "BOS": describe_bos(loaded, options.bos),
        "Perplexity": f"exp(Σ nll / Σ tokens); window {length}, stride {length}; full-precision "
        f"model in {dtype_name(loaded)}",
        "Intervals": f"±, or in parentheses, the {INTERVAL} over sequences, of a perplexity e to "
        "its loss's; a change of the loss is paired, both models on the same tokens",
        "KL": "of the quantized model's next-token distribution from the full-precision one's, "
        "nats per token",
        "Layer error": "‖ŷ − y‖ / ‖y‖ of a layer given the full-precision input; of a block with "
        "all errors before it",
        "Kurtosis": "not excess (a Gaussian has 3), over channels, of the full-precision model; "
        "max / mean: the largest |x| of a token over its mean |x|, the mean over tokens",
        "Scales": "dynamic: of the tensor at hand, one sequence at a time"
        + ("; static: the largest of calibration text" if calibration else ""),
        **(
            {"Calibration": f"{calibration} {where}, for static scales and methods"}
            if calibration
            else {}
        ),
        "Arithmetic": f"{options.arithmetic}; grids in float32; emulated schemes in float32",
        "Machine": str(machine),
    }
