"""softmax-1 in a stock Llama of Transformers, by `attn_implementation`, without patching.

    python examples/softmax1_on_a_stock_llama.py --config HuggingFaceTB/SmolLM2-135M --text book.txt

Two models start from the same random weights and train on the same batches, one with softmax and
one with softmax-1, whose weights may sum to less than one: p_i = e^{x_i} / (1 + Σ_j e^{x_j}).
save_pretrained writes "wakeful_softmax1" into config.json: Transformers then loads the folder with
softmax-1 after `import wakeful.hf`, and refuses it otherwise; `wakeful export` makes it a Granite
SWA, which needs nothing of ours. Without arguments both models are tiny and read Python's library.
"""

import torch
import tyro
from stand_in import TEXT, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import wakeful.hf  # noqa: F401  makes wakeful_softmax1 known to Transformers
from wakeful.data import read_documents


def main(config: str = "", text: str = TEXT, steps: int = 30, length: int = 64) -> None:
    path = config or tiny_llama()
    tokenizer = AutoTokenizer.from_pretrained(path)
    words = tokenizer("".join(each.text for each in read_documents(text)), verbose=False)
    tokens = torch.tensor(words.input_ids)
    rows = tokens[: len(tokens) // length * length].view(-1, length)

    for attention in ("sdpa", "wakeful_softmax1"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), attn_implementation=attention
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(steps):
            batch = rows[torch.arange(4 * step, 4 * step + 4) % len(rows)]
            model(batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = model.eval()(rows[-4:], labels=rows[-4:]).loss
        print(f"{attention}: loss {loss:.3f} after {steps} steps")
        written = model.generate(rows[:1, :8], max_new_tokens=16, do_sample=False)
        print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    tyro.cli(main)
