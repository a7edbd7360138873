"""Write the page of presets, docs/presets.md on the site, from the presets themselves."""

from wakeful.demonstration.presets import format_preset_row, sort_presets

TWO_CORES = 40e9
"""Operations a second that training reaches on two cores of a server, in float32, roughly."""
HEAD = f"""# Presets

A preset is a TOML configuration that comes with wakeful. Use its name wherever a file is accepted:

    wakeful train cpu-tiny --train.steps 1000
    wakeful compare patient --seeds 0
    wakeful presets gpt2-small > mine.toml

`wakeful presets` lists them with estimated times on your machine, and `wakeful presets NAME` prints
one. Your own file can start from one with `preset = "NAME"` at its top.

- **Parameters** are all that the model has; of a comparison, the largest variant's.
- **Tokens** are steps × batch × length, summed over all **runs** (variants × seeds).
- **Memory** is for training the largest variant: 16 bytes per parameter, about 17 numbers per
  channel, layer and token for the backward pass, and the logits twice. If that is more than you
  have, lower `train.micro_batch_size`: the steps stay the same.
- **Times are estimates, not measurements**: 6 operations per token and parameter that multiplies,
  and 6·L·H·d per layer for causal attention over L tokens by H heads of d channels, at
  {TWO_CORES / 1e9:.0f} GFLOP/s on two cores and 396 TFLOP/s on an H100. Evaluation, diagnosis and
  the extra cost of a route or an optimizer are not counted. Below 20 million parameters an H100
  waits for its host, so no time is given.
"""


def page() -> str:
    """Return the page in Markdown: how the figures are computed, then a table of each kind."""
    lines = [HEAD]
    one, several = sort_presets()
    for title, presets in (("One run", one), ("Comparisons", several)):
        lines += [f"## {title}", ""]
        lines += ["| preset | runs | parameters | tokens | memory | two cores | H100 |"]
        lines += ["|---|--:|--:|--:|--:|--:|--:|"]
        for preset in presets:
            figures = " | ".join(format_preset_row(preset, preset.operations / TWO_CORES))
            lines.append(f"| `{preset.name}`<br>{preset.summary} | {figures} |")
        lines.append("")
    return "\n".join(lines)
