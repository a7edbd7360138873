"""The tool quantize: quantizes models with schemes and measures the damage on a text."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from wakeful.errors import WakefulError
from wakeful.estimates import INTERVAL
from wakeful.hf.checkpoint_reader import Shards
from wakeful.hf.gguf_header import read_gguf_header
from wakeful.hf.gguf_out import check_gguf, gguf_bytes
from wakeful.hf.weights_out import refuse_existing
from wakeful.loading.load import load
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.reading import EvaluationData, as_evaluation_data, open_evaluation_data
from wakeful.loading.session import Session, choose_data, describe_bos, open_session
from wakeful.loading.sources import Source, convert_to_decoder, dtype_name, source_name
from wakeful.probes.running import as_decoder
from wakeful.quantization.cache import calibrate_cache, check_cache_support, quantize_cache
from wakeful.quantization.compressed import check_compressed, compressed_config, state_bytes
from wakeful.quantization.convert import (
    check_rotation,
    linear_layers,
    prepare_model,
    quantize_module,
    scheme_of,
)
from wakeful.quantization.damage import Damage
from wakeful.quantization.engines import ENGINES, EngineFormats
from wakeful.quantization.format_search import MIXED, Budget, FormatSearch, MixedModel, split_text
from wakeful.quantization.formats import matrix_bytes, scheme_fits
from wakeful.quantization.gguf_file import embedding_tables
from wakeful.quantization.measure import measure_damage, measure_losses
from wakeful.quantization.mixed_report import describe_selection
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.peers import Peer, check_peers
from wakeful.quantization.result import Quantization, QuantizationMatrix
from wakeful.quantization.rotated import (
    AUTO,
    SearchedModel,
    check_rotation_name,
    choose_rotation,
    rotate_model,
    skip_in_decoder,
)
from wakeful.quantization.rotation_choice import RotationChoice
from wakeful.quantization.schemes import SCHEMES, Absmax, Scheme, parse_scheme
from wakeful.quantization.schemes.grids import E4M3
from wakeful.quantization.sensitivity import LayerCost, measure_layer_costs
from wakeful.quantization.tuning import count_sequences
from wakeful.runs.run import Environment
from wakeful.switches import default_torch_state
from wakeful.terminal.display import DisplayFactory


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
    """Quantize models' linear layers and caches, and measure the damage on a text.

        small = wakeful.quantize("smollm2", "coarse").model
        wakeful.quantize("smollm2", "fine", "w4", text="book.txt")
        wakeful.quantize(["smollm2", "cured"], "coarse", "w4g128_gptq", "nvfp4", text="book.txt")

    The models themselves stay unchanged. A single model is measured only with `text`, `out`,
    `sensitivity`, or a budget of `bits`, `bytes` or `loss`.

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory; or a list of
            several, which are measured one after another.
        schemes: names or expressions, as in `QuantizeOptions.scheme`, or `Scheme` objects.
        tokenizer: the tokenizer of a module in memory.
        display: shows progress; None shows a bar in a terminal.
        options: `QuantizeOptions`, whose fields are keyword arguments too.

    `out` is a run directory to write, `save` a folder for the model as compressed-tensors; neither
    may exist.

    Raises:
        WakefulError: a model, a scheme or the text cannot be read, a scheme does not fit a layer's
            width or needs calibration text, compressed-tensors does not support what `save` asks
            for, or `out` or `save` exists. Results of models before that one are written to `out`.
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
    engine = _engine_formats(options) if options.chooses_formats else None
    if engine is None:
        measured_schemes = parse_schemes(options.scheme or tuple(SCHEMES))
    else:
        measured_schemes = list(engine.schemes.values())
    measures = bool(
        options.text or options.out or several or options.sensitivity or options.chooses_formats
    )
    calibrates = options.chooses_formats or any(scheme.calibrated for scheme in measured_schemes)
    texts = options.calibration_text
    if texts and not calibrates:
        raise WakefulError(
            f"calibration_text = {texts!r}: no scheme here needs calibration; leave it out"
        )
    with open_session("quantize", options, models, tokenizer, display) as tool_session:
        _check_options(options, measured_schemes, len(models))
        length = options.length or LENGTH
        counts = _SequenceCounts(
            options.num_sequences if measures else 0,
            options.calibration_sequences if calibrates else 0,
            count_sequences(options.tune, length),
        )
        num_calibration = counts.calibration + counts.tuning
        num_sequences = counts.measured + (0 if texts else num_calibration)
        data = as_evaluation_data("")
        if num_sequences:
            data = open_evaluation_data(options.source, length * num_sequences)
        calibration = [open_evaluation_data(text, length * num_calibration) for text in texts]
        quantizer = _Quantizer(
            tool_session.models(), options, measured_schemes, data, counts, calibration,
            tool_session, engine,
        )  # fmt: skip
        if several:
            return _quantize_models(quantizer.quantize_next, models or [""], options)
        result = quantizer.quantize_next(models[0])
        try:
            if options.save:
                result = replace(result, saved=result.save_model(options.save))
        finally:  # the measurement is written even if the model cannot be saved
            if options.out:
                result.save(options.out)
    return result


def _quantize_models(
    quantize_next: Callable[[Source], Quantization],
    models: Sequence[Source],
    options: QuantizeOptions,
) -> QuantizationMatrix:
    """Quantize and measure several models one after another; return the results without the
    quantized models, for which there is no memory.

    If the options name a run directory, the results are written there: those so far if a model
    fails.
    """
    results: dict[str, Quantization] = {}
    matrix = QuantizationMatrix(results=results, figures=options.figures)
    try:
        for source in models:
            result = quantize_next(source)
            name = result._measured.measurement.name
            results[name] = replace(result, models={})  # the next model needs their memory
    finally:
        if options.out and results:
            matrix.save(options.out)
    return matrix


@dataclass(frozen=True)
class _SequenceCounts:
    """Numbers of sequences of text: to measure on, to calibrate on, and to train scales on."""

    measured: int
    calibration: int
    tuning: int


@dataclass
class _Quantizer:
    """One call of the tool: quantizes and measures models one after another."""

    loading: Iterator[Model]
    options: QuantizeOptions
    schemes: Sequence[Scheme]
    data: EvaluationData
    counts: _SequenceCounts
    calibration: Sequence[EvaluationData]
    """Texts to calibrate on; empty if those sequences follow the measured ones."""
    session: Session
    engine: EngineFormats | None
    """Formats to choose from, if a format is chosen for each layer."""
    skip: Sequence[str] = ()
    """Patterns of the layers to skip, by their names in the model that is loaded last."""

    def quantize_next(self, source: Source) -> Quantization:
        """Load, quantize and measure the next of the models; `source` is its name.

        A model that its cache, the file to save or the budget would not allow is refused before
        anything is quantized.
        """
        loaded, options, counts = self._load_next(), self.options, self.counts
        show = self.session.show
        prepared = prepare_model(loaded.module, self.skip)
        layers = self._layers_to_quantize(prepared)
        if options.cache or any(scheme.cache is not None for scheme in self.schemes):
            check_cache_support(loaded.module)
        if self.engine is None:  # else each layer gets only schemes that fit it
            for scheme in self.schemes:
                check_rotation(scheme, layers)
        self._check_saving(loaded, prepared, layers)
        length = options.length_for(loaded.context)
        text = choose_data(loaded, options, self.data)
        sequences = self._read_sequences(loaded, text, length)
        measured, others = sequences[: counts.measured], sequences[counts.measured :]
        calibration, tuning = others[: counts.calibration], others[counts.calibration :]
        schemes, mixed_model = {str(scheme): scheme for scheme in self.schemes}, None
        rotated: dict[str, nn.Module] = {}
        peers: list[Peer] = []
        if self.engine is None:
            models = self._quantize_with_schemes(loaded, schemes, calibration)
        else:
            create_search = partial(
                self._create_search, engine=self.engine, calibration=calibration, tuning=tuning
            )
            searched = SearchedModel(loaded, create_search(loaded, prepared, layers))
            searched.search.check()
            peers = self._measure_peers(loaded, measured)
            mixed_model, searched = self._find_formats(searched, create_search, calibration)
            models = {
                name: _as_quantized_model(searched.model if name == MIXED else loaded, name, module)
                for name, module in mixed_model.modules.items()
            }
            prepared, layers = searched.search.model, searched.search.layers
            if mixed_model.rotation_name:
                rotated[MIXED] = searched.model.module
            schemes = mixed_model.schemes
        modules = {name: model.module for name, model in models.items()}
        costs: list[LayerCost] = []
        if options.sensitivity:  # then there is only one scheme
            costs = measure_layer_costs(
                loaded.module, next(iter(modules.values())), measured,
                on_progress=partial(show.count, f"{loaded.name}: layers alone"),
            )  # fmt: skip
        damage = None
        if measured:
            measurement = measure_damage(
                loaded.name, loaded.module, modules, measured,
                rotated=rotated,
                on_progress=partial(show.count, f"{loaded.name}: sequences"),
            )  # fmt: skip
            if mixed_model is None:  # bytes of the weights
                sizes = {name: state_bytes(model.module, model.stored)
                         for name, model in models.items()}  # fmt: skip
            else:
                sizes = mixed_model.bytes  # of the file, embeddings included
            damage = Damage(measurement, schemes, _original_bytes(loaded), sizes, peers)
        head, machine = _output_head(prepared), self.session.machine
        method = _method_table(
            loaded, options, text.name or options.source, len(layers), length, counts.calibration,
            machine,
        )  # fmt: skip
        if mixed_model is not None:
            if mixed_model.rotation is not None:
                method["Rotation"] = mixed_model.rotation.description
            method["Formats"] = describe_selection(mixed_model, len(calibration))
            models = {MIXED: models[MIXED]}  # the others were there to compare it with
        return Quantization(
            models=models, source=source_name(source), damage=damage, method=method,
            layers=tuple(layers), options=options,
            head=any(layer is head for layer in layers.values()), machine=machine,
            figures=options.figures, costs=tuple(costs), mixed_model=mixed_model,
        )  # fmt: skip

    def _measure_peers(self, loaded: Model, measured: Sequence[Tensor]) -> list[Peer]:
        """Load and measure the models that the option `against` names, one after another."""
        peers: list[Peer] = []
        for source in self.options.against:
            peers.append(self._measure_peer(source, loaded, measured))
            gc.collect()  # compressed-tensors' layers refer to themselves
        return peers

    def _measure_peer(self, source: str, loaded: Model, measured: Sequence[Tensor]) -> Peer:
        """Load another quantized version of a model, and measure it on the sequences to measure.

        Raises:
            WakefulError: it cannot be loaded, or its tokens stand for other text.
        """
        options, show = self.options, self.session.show
        show.note(f"loading {source}")
        peer = load(
            source, device=loaded.device, dtype=next(loaded.module.parameters()).dtype,
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
        ids = measured[0][0].tolist()
        # Tokenizers that GGUF files describe may decode white space differently.
        if peer.decode(ids).split() != loaded.decode(ids).split():
            raise WakefulError(
                f"the tokens of {source} stand for other text than those of {loaded.name}: name a "
                "quantized version of the same model"
            )
        totals = measure_losses(
            source, peer.module, loaded.module, measured,
            on_progress=partial(show.count, f"{source}: sequences"),
        )  # fmt: skip
        return Peer(source, _original_bytes(peer), totals)

    def _quantize_with_schemes(
        self, loaded: Model, schemes: Mapping[str, Scheme], calibration: list[Tensor]
    ) -> dict[str, Model]:
        """Return the model quantized with each scheme, by the scheme's name.

        Each scheme gets the `calibration` sequences only if it needs them.
        """
        models: dict[str, Model] = {}
        for name, scheme in schemes.items():
            self.session.show.note(f"quantizing {loaded.name}: {name}")
            module = quantize_module(
                loaded.module, scheme, calibration=calibration if scheme.calibrated else (),
                # A scheme of the cache alone has no layers to skip.
                skip=() if scheme.weights is None else self.skip,
                on_progress=partial(self.session.show.count, f"{loaded.name} {name}: layers"),
            )  # fmt: skip
            models[name] = _as_quantized_model(loaded, name, module)
        return models

    @property
    def _for_llama_cpp(self) -> bool:
        return self.engine is not None and self.engine.quantizes_embeddings

    def _load_next(self) -> Model:
        """Load the next model, and set `skip` to the patterns of its layers.

        For llama.cpp it is converted to a decoder, as GGUF files are written of decoders only. To
        be rotated it is converted too if it can be; a pattern of Transformers' names then becomes
        names of the decoder's layers.

        Raises:
            WakefulError: it is quantized already, or no GGUF file can hold it.
        """
        loaded, self.skip = next(self.loading), self.options.skip
        if loaded.is_quantized:
            raise WakefulError(
                f"{loaded.name} is quantized already: name the model that it was made from"
            )
        if self._for_llama_cpp:
            loaded = convert_to_decoder(loaded, self.session.show)
            check_gguf(loaded.decoder(), loaded.wakeful_tokenizer)
        elif self.options.rotation and as_decoder(loaded.module) is None:
            with suppress(WakefulError):  # raised again, with its reason, where it is rotated
                converted = convert_to_decoder(loaded, self.session.show)
                if self.options.save:
                    _ = converted.wakeful_tokenizer  # raises if it cannot be written
                self.skip = skip_in_decoder(converted.decoder(), self.skip)
                return converted
        return loaded

    def _layers_to_quantize(self, prepared: nn.Module) -> dict[str, nn.Module]:
        """Return the layers to quantize, by name.

        There are none if all schemes quantize the cache alone. With --bits, whose budget is of the
        other layers, the output head is left out; for llama.cpp it is one of the layers.
        """
        if all(scheme.weights is None for scheme in self.schemes):
            return {}
        layers = linear_layers(prepared, self.skip)
        if self.options.bits and not self._for_llama_cpp:
            head = _output_head(prepared)
            layers = {name: layer for name, layer in layers.items() if layer is not head}
        return layers

    def _find_formats(
        self, searched: SearchedModel, create_search: Callable[..., FormatSearch],
        calibration: Sequence[Tensor],
    ) -> tuple[MixedModel, SearchedModel]:  # fmt: skip
        """Return the model with the best formats within the budget, and the model in full precision
        that was quantized: the given one, or a rotated one.

        `create_search` creates the search for the formats of a rotated model; caches are calibrated
        on the `calibration` sequences.
        """
        options, choice = self.options, None
        if options.rotation:
            choice, rotated = self._choose_rotation(searched, create_search)
            searched = rotated or searched
        mixed_model = replace(searched.search.find_formats(), rotation=choice)
        if options.cache:
            _quantize_caches(mixed_model.modules.values(), options.cache, calibration)
        return mixed_model, searched

    def _choose_rotation(
        self, unrotated: SearchedModel, create_search: Callable[..., FormatSearch]
    ) -> tuple[RotationChoice, SearchedModel | None]:
        """Return the rotation that the options name, or the best by measuring, and the rotated
        model, None for no rotation.

        `create_search` creates the search for the formats of a rotated model.

        Raises:
            WakefulError: the model cannot be rotated as the options say, or could not be saved.
        """

        def rotate(rotation: str) -> SearchedModel:
            self.session.show.note(f"{unrotated.model.name}: rotation {rotation}")
            rotated = rotate_model(unrotated.model, rotation)
            prepared = prepare_model(rotated.module, self.skip)
            layers = self._layers_to_quantize(prepared)
            self._check_saving(rotated, prepared, layers)
            search = create_search(rotated, prepared, layers, unrotated=unrotated.search)
            return SearchedModel(rotated, search)

        if self.options.rotation == AUTO:
            return choose_rotation(unrotated.search, rotate)
        return RotationChoice(self.options.rotation), rotate(self.options.rotation)

    def _create_search(
        self, loaded: Model, prepared: nn.Module, layers: Mapping[str, nn.Module],
        engine: EngineFormats, calibration: Sequence[Tensor], tuning: Sequence[Tensor],
        unrotated: FormatSearch | None = None,
    ) -> FormatSearch:  # fmt: skip
        """Return the search for the formats of a model's layers, within the budget of the options.

        `prepared` is the model's module with all its `layers` in place. Layers are rounded and
        formats selected by the `calibration` sequences, scales are trained on the `tuning`
        sequences. `unrotated` is the search for the model before it was rotated; None if it was
        not.
        """
        options, show_count, name = self.options, self.session.show.count, loaded.name
        stored_dtype, decoder = loaded.export_dtype, as_decoder(prepared)
        embeddings, model_bytes = {}, state_bytes(prepared, loaded.stored)
        if engine.quantizes_embeddings and decoder is not None:  # for a GGUF file, in float16
            embeddings, stored_dtype = embedding_tables(decoder), torch.float16
            model_bytes = gguf_bytes(decoder)
        rounding_text, selection_text = split_text(calibration)
        return FormatSearch(
            prepared, layers, Budget(options.bits, options.bytes, options.loss),
            rounding_text, selection_text, model_bytes=model_bytes, stored_dtype=stored_dtype,
            engine=engine, embeddings=embeddings, tuning_steps=options.tune, tuning_text=tuning,
            tuning_state=Path(options.tuning_state) if options.tuning_state else None,
            unrotated=unrotated,
            on_rounding=partial(show_count, f"{name}: layers in all formats"),
            on_tuning=partial(show_count, f"{name}: steps of training scales"),
        )  # fmt: skip

    def _check_saving(
        self, loaded: Model, prepared: nn.Module, layers: Mapping[str, nn.Module]
    ) -> None:
        """Raise `WakefulError` if the model is to be saved as compressed-tensors, which would
        refuse it once these layers are quantized.
        """
        if not self.options.save or self._for_llama_cpp:
            return
        schemes = self._schemes_to_save(layers)
        layers_to_save = {name: layers[name] for name in schemes}
        check_compressed(prepared, schemes, layers_to_save, _tokenizer_to_write(loaded))

    def _schemes_to_save(self, layers: Mapping[str, nn.Module]) -> dict[str, Scheme]:
        """Return the scheme in which each quantized layer will be saved, by the layer's name.

        If a format is yet to be chosen for each layer, the first that fits the layer stands for it:
        this is to check early whether the file can hold the layers. A layer that no format fits
        stays in full precision, and is left out.
        """
        if self.engine is None:
            return dict.fromkeys(layers, self.schemes[0])
        schemes_by_layer: dict[str, Scheme] = {}
        for name, layer in layers.items():
            fitting = [scheme for scheme in self.schemes if scheme_fits(layer, scheme)]
            if fitting:
                schemes_by_layer[name] = fitting[0]
        return schemes_by_layer

    def _read_sequences(self, loaded: Model, text: EvaluationData, length: int) -> list[Tensor]:
        """Return token ids (1, `length`) of sequences: those to measure on come first, then those
        to calibrate on, and last those to train scales on.

        Sequences to measure on are from `text`. The others are from the calibration texts, or, if
        there are none, they follow the measured ones in `text`.

        Raises:
            WakefulError: a sequence would be both measured and calibrated on.
        """
        bos, counts = loaded.starts_with_bos(self.options.bos), self.counts

        def read(data: EvaluationData, count: int) -> list[list[int]]:
            """Return the first `count` sequences of a text."""
            if not count:  # then there may be no text
                return []
            return data.sequences(loaded, length=length, num_sequences=count, bos=bos)

        if not self.calibration:
            sequences = read(text, counts.measured + counts.calibration + counts.tuning)
        else:
            measured, calibration = read(text, counts.measured), self._read_calibration_texts(read)
            if any(tokens in measured for tokens in calibration):
                raise WakefulError(
                    "calibration_text begins with the sequences that are measured: name another "
                    "text, or leave it out"
                )
            sequences = measured + calibration
        return [torch.tensor([tokens], device=loaded.device) for tokens in sequences]

    def _read_calibration_texts(
        self, read: Callable[[EvaluationData, int], list[list[int]]]
    ) -> list[list[int]]:
        """Return sequences of the calibration texts: first those to calibrate on, text after text,
        then those to train scales on, one of each text in turn.

        All texts have equal shares of both. `read(text, count)` returns a text's first sequences.
        """
        counts, num_texts = self.counts, len(self.calibration)
        calibration: list[list[int]] = []
        tuning_by_text: list[list[list[int]]] = []
        for index, text in enumerate(self.calibration):
            # This text's share, as when each text in turn gives one sequence.
            num_calibration = len(range(index, counts.calibration, num_texts))
            num_tuning = len(range(index, counts.tuning, num_texts))
            sequences = read(text, num_calibration + num_tuning)
            calibration += sequences[:num_calibration]
            tuning_by_text.append(sequences[num_calibration:])
        # None fills the turns of a text that has no more sequences.
        in_turn = chain.from_iterable(zip_longest(*tuning_by_text))
        return calibration + [tokens for tokens in in_turn if tokens is not None]


def _engine_formats(options: QuantizeOptions) -> EngineFormats:
    """Return the formats to choose from, the smallest first: the schemes that the options name, or
    else the engine's own.

    Raises:
        WakefulError: a scheme is unknown or named twice, the files of the engine cannot hold one,
            or they hold no quantized cache.
    """
    engine = ENGINES[options.for_]
    if engine.quantizes_embeddings and options.cache:
        raise WakefulError(
            "--cache needs --for vllm: llama.cpp sets the type of its cache when it runs"
        )
    if engine.quantizes_embeddings and options.scheme:
        raise WakefulError("--scheme gives the formats of --for vllm; llama.cpp has its own")
    if not options.scheme:
        return engine
    schemes = parse_schemes(options.scheme)
    for scheme in schemes:
        compressed_config({scheme: ()})  # raises if the file cannot hold it
        if scheme.rotation and options.save:  # not every layer that may get it can be saved so
            raise WakefulError(
                f"{scheme} rotates inputs, and cannot be one of several formats in a saved model: "
                "leave --save out, or name this scheme alone, without a budget"
            )
    # By the bytes of one row. It is so long that it has whole groups in all schemes.
    ordered = sorted(schemes, key=lambda scheme: matrix_bytes(scheme, 1, 128 * 128))
    return replace(engine, schemes={str(scheme): scheme for scheme in ordered})


def _quantize_caches(
    modules: Iterable[nn.Module], format_name: str, calibration: Sequence[Tensor]
) -> None:
    """Quantize the key/value caches of quantized models in place, with scales set by calibration
    text.

    `format_name` is a value of --cache: "fp8" or "int8", with one scale per tensor, or with
    "_head" appended, with one per head.
    """
    number, _, per_head = format_name.partition("_")
    per = "head" if per_head else "tensor"
    grid = E4M3(per=per) if number == "fp8" else Absmax(bits=8, per=per)
    for module in modules:
        scheme = scheme_of(module)
        assert scheme is not None  # the scheme of the model's layers, to which the cache's is added
        calibrate_cache(quantize_cache(module, replace(scheme, cache=grid)), calibration)


def _as_quantized_model(loaded: Model, scheme: str, module: nn.Module) -> Model:
    """Return a copy of a loaded model that has the quantized module instead of its own.

    The name of the `scheme` is added to the model's name and architecture; no file holds it yet.
    """
    return replace(
        loaded, name=f"{loaded.name} {scheme}", module=module, path=None,
        architecture=f"{loaded.architecture}, {scheme}",
    )  # fmt: skip


def _tokenizer_to_write(loaded: Model) -> Tokenizer | None:
    """Return the tokenizer to write with a decoder; None for a Transformers model, which has its
    own.
    """
    return None if as_decoder(loaded.module) is None else loaded.wakeful_tokenizer


def _output_head(model: nn.Module) -> nn.Module | None:
    """Return a model's output head; None if it has none."""
    decoder = as_decoder(model)
    if decoder is not None:
        return decoder.head
    get_head: Callable[[], nn.Module] | None = getattr(model, "get_output_embeddings", None)
    return None if get_head is None else get_head()


def parse_schemes(expressions: Sequence[str]) -> list[Scheme]:
    """Return the schemes of expressions; modules of a user's own that these name are imported.

    Raises:
        WakefulError: an expression does not parse, or a scheme is named twice.
    """
    schemes: list[Scheme] = []
    for expression in expressions:
        scheme = parse_scheme(expression, imports=True)
        if scheme in schemes:
            raise WakefulError(f"scheme {scheme} is named twice")
        schemes.append(scheme)
    return schemes


def _check_options(options: QuantizeOptions, schemes: Sequence[Scheme], num_models: int) -> None:
    """Raise `WakefulError` if the options do not fit the schemes or the number of models."""
    if options.chooses_formats and num_models > 1:
        raise WakefulError(f"--bits, --bytes and --loss take one model, and {num_models} are named")
    if options.sensitivity and (len(schemes) > 1 or schemes[0].weights is None or num_models > 1):
        raise WakefulError(
            "--sensitivity ranks the layers of one model under one scheme of weights, such as "
            "--scheme w4a16"
        )
    if options.rotation:
        check_rotation_name(options.rotation)
    check_peers(options.against)
    if options.skip and all(scheme.weights is None for scheme in schemes):
        raise WakefulError(
            f"{' and '.join(map(str, schemes))} quantize the cache alone: there is nothing to "
            f"--skip"
        )
    if options.tuning_state and not Path(options.tuning_state).absolute().parent.is_dir():
        raise WakefulError(
            f"tuning_state = {str(options.tuning_state)!r}: its folder does not exist; create it, "
            "or name another file"
        )
    if options.save:
        _check_save(options, schemes, num_models)


def _check_save(options: QuantizeOptions, schemes: Sequence[Scheme], num_models: int) -> None:
    """Raise `WakefulError` if --save cannot be done.

    It needs one model and one scheme or chosen formats, which the file can hold. Its path must not
    exist or overlap that of --out, and for llama.cpp it ends in .gguf or .txt.
    """
    if num_models > 1:
        raise WakefulError(f"--save writes one model, and {num_models} are named")
    if len(schemes) > 1 and not options.chooses_formats:
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
        compressed_config({schemes[0]: ()})  # raises if the format does not support the scheme
    saved, out = Path(options.save).resolve(), Path(options.out).resolve()
    if options.out and (saved.is_relative_to(out) or out.is_relative_to(saved)):
        raise WakefulError(
            f"--save {options.save} and --out {options.out} are the same folder or one is inside "
            "the other: name two separate folders"
        )
    refuse_existing(Path(options.save))


def _original_bytes(loaded: Model) -> int:
    """Return the bytes of a model's weights in the files that it was loaded from, a GGUF file or a
    folder; without such files, the bytes that the weights would take.
    """
    path = loaded.path
    if path is not None and path.is_file():
        return sum(tensor.num_bytes for tensor in read_gguf_header(path).tensors.values())
    if path is not None and (path / "config.json").is_file():
        with Shards(path) as tensors:
            return tensors.num_bytes
    return state_bytes(loaded.module, loaded.stored)


def _method_table(
    loaded: Model,
    options: QuantizeOptions,
    text: str,
    num_layers: int,
    length: int,
    num_calibration: int,
    machine: Environment,
) -> dict[str, str]:
    """Return the rows of the report's section on how the damage was measured, by title.

    `text` is the name of the measured text, `num_layers` the number of quantized layers (0 for a
    scheme of the cache alone), `length` the tokens of a sequence, and `num_calibration` the number
    of calibration sequences, 0 if there are none.
    """
    layers = "none: keys and values are rounded as attention reads them"
    if num_layers:
        layers = (
            f"{num_layers} linear layers; embeddings, norms and a head tied to an embedding stay"
        )
        layers += f", and what matches {', '.join(options.skip)}" if options.skip else ""
    calibration = {}
    if num_calibration:
        texts = " and ".join(options.calibration_text)
        sequences = f"sequences from the beginning of {texts}" if texts else "further sequences"
        calibration["Calibration"] = f"{num_calibration} {sequences}, for static scales and methods"
    static = "; static: of the largest number of calibration text" if num_calibration else ""
    return {
        "Model": f"{loaded.name} ({loaded.architecture})",
        "Layers": layers,
        "Text": f"{text}, {options.num_sequences} sequences of {length} tokens from its "
        "beginning, the same for every scheme",
        "BOS": describe_bos(loaded, options.bos),
        "Perplexity": f"exp(Σ nll / Σ tokens); window {length}, stride {length}; full-precision "
        f"model in {dtype_name(loaded)}",
        "Intervals": f"± or in parentheses: the {INTERVAL} over sequences; of a perplexity, exp of "
        "its loss's interval; of a change of the loss, paired on the same tokens",
        "Scales": f"dynamic: of the current tensor, one sequence at a time{static}",
        **calibration,
        "Machine": str(machine),
    }
