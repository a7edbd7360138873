"""An inheritance as one offline HTML page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wakeful.growth.layermap import written
from wakeful.pages.inheritance.charts import colors, layer_figures, loss_curves
from wakeful.pages.inheritance.reading import (
    choice,
    cost_of_reference,
    final_heir,
    read_inheritance,
    verdicts,
)
from wakeful.pages.page import render
from wakeful.runs.run import replaced

_SIZES = (
    ("parameters", "parameters", "{:,.0f}", 1.0),
    ("weight_bytes", "weights, MB", "{:,.1f}", 1e-6),
    ("cache_bytes_per_token", "key/value cache, B a token", "{:,.0f}", 1.0),
    ("cache_bytes", "key/value cache of a whole context, MB", "{:,.2f}", 1e-6),
    ("tokens_per_second", "generation, tokens a second", "{:,.1f}", 1.0),
)


def write_inheritance(path: str | Path, page: str | Path = "") -> Path:
    """Write the page about an inheritance's folder; an old page stays until the new is whole."""
    summary, environment = read_inheritance(path)
    reference = summary["reference"]
    html = render(
        "inheritance.html.j2",
        title=f"Inherited from {reference['name']}",
        summary=summary,
        heir=final_heir(summary),
        verdicts=verdicts(summary),
        cost=cost_of_reference(reference),
        choice=choice(summary),
        curves=loss_curves(summary),
        figures=layer_figures(summary),
        colors=colors(summary),
        sizes=_sizes(summary["sizes"]),
        method=_method(summary, environment),
        written=written,
    )
    place = Path(page or Path(path) / "report.html")
    with replaced(place) as temporary:
        temporary.write_text(html, "utf-8")
    return place


def _sizes(sizes: Mapping[str, Any]) -> list[dict[str, str]]:
    rows = []
    for key, title, style, unit in _SIZES:
        ours, theirs = sizes["heir"][key], sizes["reference"][key]
        rows.append(
            {
                "title": title,
                "heir": style.format(ours * unit),
                "reference": style.format(theirs * unit),
                "ratio": f"{ours / theirs:.3f}" if theirs else "–",
            }
        )
    return rows


def _method(summary: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    recipe, data = summary["recipe"], summary["data"]
    train, optimizer = recipe["train"], recipe["optimizer"]
    source = data["source"]
    text = source if isinstance(source, str) else ", ".join(map(str, source))
    dropped = (
        f"; {data['dropped_documents']} held-out documents ({data['dropped_tokens']:,} tokens) "
        "stand in the training text in part and were left out"
        if data["dropped_documents"]
        else ""
    )
    steps = "as many as the time allowed" if summary["planned_by_time"] else "as asked"
    return {
        "Text": f"{text}; {data['train_tokens']:,} training tokens, all with the reference's "
        "tokenizer",
        "Validation": f"{data['validation_tokens']:,} tokens, fixed, each predicted once in "
        f"windows of {train['length']}; the reference on the same by the same code{dropped}",
        "BOS": "none before a window, for heir and reference; each document ends with the "
        "end-of-text token",
        "Training": f"{train['steps']} steps a round ({steps}) of {train['batch_size']} sequences "
        f"of {train['length']} tokens, the same for all; {optimizer['name']}, learning rate "
        f"{optimizer['lr']:g} after {optimizer['warmup_steps']} steps, cosine to "
        f"{optimizer['final_lr']:g}; weight decay {optimizer['weight_decay']:g}; {train['dtype']}; "
        f"seed {train['seed']}",
        "Inherited": f"{recipe['copy']} of each block, with embedding, positions, final norm and "
        f"head; route {recipe['route'] or 'the reference’s'}, normalizer "
        f"{recipe['normalizer'] or 'the reference’s'}",
        "Errors": "± one standard error over validation windows, differences paired; one seed, so "
        "they say nothing of other seeds",
        "Speed": "greedy, one sequence, by turns with the reference, the median of three",
        "Machine": f"{environment['device_name']}, {environment['threads']} threads; torch "
        f"{environment['torch']}, wakeful {environment['wakeful']}",
    }
