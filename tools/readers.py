"""What engines compute of exported models, asked in their own environment, without wakeful:

    PYTHON tools/readers.py READER DTYPE JOBS.json ANSWERS.jsonl

`tools/served.py` writes the jobs and compares the answers.
"""

import gc
import json
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

WRITTEN, BEGINS = 24, 32
"""Tokens that are written, and after how many."""
POSITIONS = range(9, 200, 10)
"""Where llama.cpp is asked, which tells the likelihood of a next token alone."""
Job = dict[str, Any]


def by_transformers(jobs: list[Job], dtype: str) -> Iterator[dict[str, Any]]:
    """Yield what Transformers computes of each job."""
    import torch
    from transformers import AutoModelForCausalLM

    for job in jobs:
        model = AutoModelForCausalLM.from_pretrained(
            job["folder"], dtype=dtype, trust_remote_code=job["kind"] == "wakeful"
        ).eval()
        tokens = torch.tensor([job["tokens"]])
        with torch.no_grad():
            found = model(tokens[:, :-1]).logits[0].float().log_softmax(-1)
            text = model.generate(
                tokens[:, :BEGINS],
                max_new_tokens=WRITTEN,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        taken = found.gather(1, tokens[0, 1:].unsqueeze(1))[:, 0].tolist()
        yield {"logprobs": taken, "text": text[0, BEGINS:].tolist()}


def by_vllm(jobs: list[Job], dtype: str) -> Iterator[dict[str, Any]]:
    """Yield what vLLM computes of each job."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    for job in jobs:
        try:
            model = LLM(
                job["folder"], dtype=dtype, enforce_eager=True, max_model_len=256 - 8,
                max_num_seqs=4, trust_remote_code=job["kind"] == "wakeful",
            )  # fmt: skip
            read, written = model.generate(
                [{"prompt_token_ids": part} for part in (job["tokens"], job["tokens"][:BEGINS])],
                [
                    SamplingParams(max_tokens=1, prompt_logprobs=0),
                    SamplingParams(max_tokens=WRITTEN, temperature=0, ignore_eos=True),
                ],
                use_tqdm=False,
            )
            taken = [
                row[token].logprob
                for row, token in zip(read.prompt_logprobs[1:], job["tokens"][1:], strict=True)
            ]
            yield {"logprobs": taken, "text": list(written.outputs[0].token_ids)}
            del model
        except Exception as error:  # whatever an engine raises is its refusal
            yield {"refused": str(error).strip().splitlines()[-1]}
        cleanup_dist_env_and_memory()
        gc.collect()


def by_llama_cpp(jobs: list[Job], dtype: str) -> Iterator[dict[str, Any]]:
    """Yield what llama.cpp computes of each job's file, in `dtype` whatever it is."""
    import xllamacpp as engine

    for job in jobs:
        if not job["gguf"]:
            yield {"refused": job["no file"]}
            continue
        options = engine.CommonParams()
        options.model.path = job["gguf"]
        options.n_ctx, options.n_parallel, options.warmup, options.verbosity = 256, 1, False, 0
        options.cache_type_k = options.cache_type_v = engine.ggml_type.GGML_TYPE_F32
        options.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1  # more wait by turning
        server = engine.Server(options)
        taken: list[float] = []
        for end in POSITIONS:
            token, table = job["tokens"][end + 1], {}
            for count in (1000, 60_000):  # few say where a token is likely
                if token not in table:
                    request = {
                        "prompt": job["tokens"][: end + 1], "n_predict": 1, "n_probs": count,
                        "cache_prompt": True, "temperature": 0,
                    }  # fmt: skip
                    table = _likeliest(server, request)
            taken.append(table[token])
        text: list[int] = []
        for _ in range(WRITTEN):
            request = {
                "prompt": [*job["tokens"][:BEGINS], *text], "n_predict": 1, "n_probs": 1,
                "cache_prompt": True, "temperature": 0,
            }  # fmt: skip
            text.append(next(iter(_likeliest(server, request))))
        yield {"logprobs": taken, "text": text, "at": list(POSITIONS)}
        del server


def by_mlx(jobs: list[Job], dtype: str) -> Iterator[dict[str, Any]]:
    """Yield what mlx-lm computes of each job, in the dtype in which it is stored."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    for job in jobs:
        try:
            model, _ = load_model(Path(job["folder"]))
        except Exception as error:  # whatever an engine raises is its refusal
            yield {"refused": str(error).strip().splitlines()[-1]}
            continue
        tokens = mx.array(job["tokens"])
        logits = model(tokens[None, :-1])[0].astype(mx.float32)
        found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        taken = mx.take_along_axis(found, tokens[1:, None], axis=-1)[:, 0].tolist()
        steps = generate_step(tokens[:BEGINS], model, max_tokens=WRITTEN)
        yield {"logprobs": taken, "text": [int(token) for token, _ in steps]}


def _likeliest(server: Any, request: dict[str, Any]) -> dict[int, float]:
    """Return the log probabilities of the likeliest next tokens, the first of them first."""
    reply = server.handle_completions(request)["choices"][0]["logprobs"]["content"][0]
    return {each["id"]: each["logprob"] for each in reply["top_logprobs"]}


READERS = {
    "transformers": (by_transformers, "transformers"), "vllm": (by_vllm, "vllm"),
    "llama.cpp": (by_llama_cpp, "xllamacpp"), "mlx-lm": (by_mlx, "mlx_lm"),
}  # fmt: skip


def main(reader: str, dtype: str, jobs: str, answers: str) -> None:
    """Answer the jobs that are not answered yet; the first line says which version does."""
    answer, package = READERS[reader]
    name, file = packages_distributions()[package][0], Path(answers)
    if not file.is_file():
        file.write_text(json.dumps({"version": f"{name} {version(name)}"}) + "\n", "utf-8")
    done = len(file.read_text("utf-8").splitlines()) - 1
    with file.open("a", encoding="utf-8") as place:
        for found in answer(json.loads(Path(jobs).read_text("utf-8"))[done:], dtype):
            print(json.dumps(found), file=place, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
