"""Where does a model waste its attention? Any causal model of Transformers, in memory, answers.

    python examples/diagnose_any_model.py --model HuggingFaceTB/SmolLM2-135M --text book.txt

Without arguments it looks at a tiny random model and text of Python's standard library.
"""

import tyro
from stand_in import TEXT, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import wakeful


def main(model: str = "", text: str = TEXT, length: int = 64, out: str = "") -> None:
    path = model or tiny_llama()
    network = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)

    found = wakeful.diagnose(network, tokenizer=tokenizer, text=text, length=length)
    print(*found.verdicts, sep="\n")

    # Every figure is a row of a polars frame: by layer and head, with its standard error.
    sinks = found.frame.filter(metric="first_key_mass_without_row_0").drop_nulls("head")
    strongest = sinks.sort("value", descending=True).head(5)
    print(strongest.select("layer", "head", "value", "standard_error"))

    if out:
        print("tables and one offline page:", found.save(out))


if __name__ == "__main__":
    tyro.cli(main)
