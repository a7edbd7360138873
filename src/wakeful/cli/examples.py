"""Commands of every verb, two or three, that its help begins with, and what each does."""

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "demo": (
        ("wakeful demo", "Tell the whole story in minutes, on one page: runs/demo/demo.html."),
        ("wakeful demo --resume", "Resume an interrupted demonstration."),
    ),
    "train": (
        ("wakeful train cpu-tiny --out runs/first",
         "Train a small Llama-like model on the Python standard library, in minutes."),
        ("wakeful train cpu-tiny --model.route resformer --train.steps 1000",
         "The same preset with ResFormer's value route, for 1,000 steps."),
    ),
    "compare": (
        ("wakeful compare patient --seeds 0 --only vanilla large-sink",
         "Watch a one-layer model grow an attention sink, and its twin grow none."),
        ("wakeful compare demo --seeds 0 1 2 --variants.softmax1.optimizer.lr 1e-3",
         "Train four variants with three seeds each, one of them with a rate of its own."),
    ),
    "generate": (
        ('wakeful generate smollm2 --prompt "Once upon a time"',
         "Stream a continuation by a pretrained model."),
        ('wakeful generate runs/first --prompt "def main(" --temperature 0',
         "Continue with a model of your own, always with the likeliest token."),
        ('wakeful generate smollm2 --chat --prompt "What is gravity?"',
         "Answer what a user says, by the model's chat template."),
    ),
    "diagnose": (
        ("wakeful diagnose smollm2 --text book.txt",
         "Find the lazy layers, sinks and outliers of a model; the page says where they are."),
        ("wakeful diagnose runs/first runs/second --figures svg",
         "Compare two models side by side and write the charts for a paper."),
    ),
    "inherit": (
        ("wakeful inherit smollm2 --keep 0.5 --minutes 30",
         "Keep half the layers of a model and heal what is left for half an hour."),
        ("wakeful inherit runs/first --layers 4 --steps 50 --baseline random",
         "Take four layers of a run of your own, and train a random start beside them."),
        ("wakeful inherit runs/first --recipe inheritune --minutes 30",
         "Inheritune, as its paper has it: the first half, trained and grown until parity."),
    ),
    "cure": (
        ("wakeful cure smollm2 --rotate hadamard --prefix auto",
         "Rotate outliers away and store the sink's token, without training."),
        ("wakeful cure runs/first --sinks --steps 100",
         "Give every head a learned sink and train for 100 steps."),
    ),
    "evaluate": (
        ("wakeful evaluate runs/first runs/second --text book.txt",
         "Compare the perplexity of two models on the same text."),
        ("wakeful evaluate smollm2 --lambada lambada.jsonl --limit 200",
         "Predict the last word of 200 passages."),
        ("wakeful evaluate smollm2 heir --texts wiki.txt code.txt --speed 128 1024",
         "Compare perplexity on two texts, and what each model costs to serve."),
    ),
    "quantize": (
        ("wakeful quantize smollm2 --scheme fine w4",
         "Measure what 8 and 4 bits cost."),
        ("wakeful quantize runs/first --scheme w4 --save runs/first-w4",
         "Write a model of 4 bits, which every verb loads."),
    ),
    "data": (
        ("wakeful data prepare notes/*.txt --out data/notes --vocab_size 8000",
         "Turn text files into tokens, with a tokenizer trained on them."),
        ("wakeful data prepare hf:roneneldan/TinyStories --out data/stories",
         "Do the same with a dataset of the Hugging Face hub."),
    ),
    "data generate": (
        ("wakeful data generate smollm2 --out data/own --tokens 200000",
         "Let a model write its own training data: questions and answers, by its chat template."),
        ("wakeful data generate runs/first --out data/own --prompts prompts.txt --length 128",
         "Continue one prompt per line; a run without a chat template writes plain text."),
    ),
    "report": (
        ("wakeful report runs/compare-patient", "Write the page of a comparison again."),
        ("wakeful report runs/first runs/second --out both.html",
         "Set two runs side by side on one page."),
    ),
    "export": (
        ("wakeful export runs/first first-for-everybody",
         "Write a folder for AutoModelForCausalLM.from_pretrained."),
        ("wakeful export runs/first first.gguf --gguf q8_0",
         "Write one file for llama.cpp, with matrices of 8 bits."),
        ("wakeful export openai/gpt-oss-20b shorter --layers 0-14 19-23",
         "Leave layers out of any Transformers model."),
    ),
    "presets": (
        ("wakeful presets", "List what comes with wakeful, with sizes and times."),
        ("wakeful presets cpu-tiny", "Print one, as a starting point for a file of your own."),
    ),
    "completion": (
        ("wakeful completion bash > ~/.local/share/bash-completion/completions/wakeful",
         "Complete verbs and options with the tab key, from the next shell on."),
        ("wakeful completion fish > ~/.config/fish/completions/wakeful.fish",
         "The same for fish."),
    ),
}  # fmt: skip
