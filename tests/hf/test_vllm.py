"""What vLLM makes of compressed-tensors folders, where WAKEFUL_VLLM names a Python that has it.

On a processor vLLM 0.32 chooses no kernel for NVFP4, and gives transforms no product to multiply
by, though it has both: the script below hands them over. 4-bit integers it computes in bfloat16.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wakeful.hf.weights_in import convert_hf_model
from wakeful.model.decoder import Decoder
from wakeful.probes.running import logits_of
from wakeful.quantization import parse_scheme, quantize_module
from wakeful.quantization.compressed import save_compressed
from wakeful.surgery.rotate import rotate

PYTHON = os.environ.get("WAKEFUL_VLLM", "")
TOKENS = torch.arange(48)[None] * 7 % 61
TEXT = [(torch.arange(48)[None] * n + n) % 61 for n in (3, 5, 11)]
SCRIPT = """
import json, sys, torch
from vllm import LLM, SamplingParams
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.transform import module
from vllm.platforms.interface import PlatformEnum

if __name__ == "__main__":
    folder, dtype, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    module.HadamardTransform.cpu_linear = staticmethod(torch.nn.functional.linear)
    model = LLM(folder, dtype=dtype, enforce_eager=True, max_model_len=64, max_num_seqs=2,
                skip_tokenizer_init=True)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
    found = model.generate([{"prompt_token_ids": tokens}], asked)[0].prompt_logprobs
    print("FOUND", json.dumps([found[i][token].logprob for i, token in enumerate(tokens) if i]))
"""


def decoder() -> Decoder:
    torch.manual_seed(0)
    return convert_hf_model(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=61, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                initializer_range=0.1,
            )
        ).eval()
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="WAKEFUL_VLLM names no Python with vLLM")
@pytest.mark.parametrize(
    ("scheme", "inner", "dtype"),
    [
        ("scheme(weights=absmax(bits=4, per='channel', group=32))", True, "bfloat16"),
        ("nvfp4(scales='static')", True, "float32"),
        ("fp8", True, "float32"),
        ("scheme(weights=absmax(bits=4, per='channel', group=32), rotation=32)", False, "bfloat16"),
        ("w8a8(rotation=64)", False, "float32"),
    ],
)
def test_it_runs_the_rotated_model_that_was_quantized(
    scheme: str, inner: bool, dtype: str, tmp_path: Path
) -> None:
    parsed = parse_scheme(scheme)
    turned = rotate(decoder(), inner=True) if inner else decoder()
    calibration = TEXT if parsed.calibrated else ()
    skip = ["head"] if parsed.rotation else []
    ours = quantize_module(turned, parsed, calibration=calibration, skip=skip)
    save_compressed(ours, tmp_path / "small", lambda _: None)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [PYTHON, tmp_path / "script.py", tmp_path / "small", dtype, json.dumps(TOKENS[0].tolist())],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
             "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-2000:]
    found = torch.tensor(json.loads(lines[-1].removeprefix("FOUND ")))
    expected, whole = (
        logits_of(each, TOKENS).float().log_softmax(-1)[0, :-1].gather(1, TOKENS[0, 1:, None])[:, 0]
        for each in (ours, turned)
    )
    # Two roundings of inputs are as far apart as either is from the model itself.
    assert (found - expected).abs().mean() < 2 * (whole - expected).abs().mean()
