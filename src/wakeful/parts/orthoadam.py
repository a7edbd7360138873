# Copyright 2026 the wakeful authors. SPDX-License-Identifier: Apache-2.0
"""OrthoAdam in one file: Adam whose moments live in a randomly rotated basis of each weight.

From Attention to Activation, Algorithm 1. For each matrix a fixed random orthogonal Q along its
axis in the residual stream:

    ḡ = Q g,   m̄ ← β₁ m̄ + (1 − β₁) ḡ,   v̄ ← β₂ v̄ + (1 − β₂) ḡ²,
    s̄ = m̂ / (√v̂ + ε),   θ ← (1 − η λ) θ − η Qᵀ s̄

with m̂ = m̄ / (1 − β₁ᵗ), v̂ = v̄ / (1 − β₂ᵗ) and weight decay λ decoupled, in the original basis.

    from orthoadam import OrthoAdam
    optimizer = OrthoAdam(model, lr=1e-3)  # or model.named_parameters(), or groups of them
    print(optimizer.axes)

Vectors keep Adam. A matrix is rotated on its inputs, axis 1 of (out, in); one that writes to the
residual stream on its outputs, axis 0. These are known by their names in Transformers, nanoGPT,
litgpt, torchtitan, Megatron-LM and OLMo-core (`WRITES`), or named by `axes=`. The steps of
`wakeful.optim.OrthoAdam` are the same to the bit; it also takes sharded parameters (FSDP2).

Cite: Kaul et al. 2025, From Attention to Activation; wakeful, by its CITATION.cff.
"""

import functools
import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

WRITES = re.compile(
    r"(?:.*\.)?(?:layers?|h|blocks?)\.\d+\.(?:.*\.)?(?:o_proj|out_proj|down_proj|c_proj|fc2|fc_out|w2"
    r"|wo|Wo|w_out|dense_4h_to_h|(?:self_attn|(?:self_)?attention)\.dense|output\.dense|\w+Attention\.o"
    r"|(?:attn|mlp|experts\.\d+|shared_experts)\.proj|linear_proj|linear_fc2|linear2|out_lin|lin2)"
    r"[._]weight\d*"
)
"""Names of layers' matrices whose outputs are added to the residual stream."""
EXACT: Any = {"dtype": torch.float64, "device": "cpu"}  # whatever torch's defaults are
LARGEST_DENSE = 512  # an odd factor wider than this goes through the FFT
TAIL = 16  # the innermost factor: the fastest matrix product an element
LARGEST_FACTOR = 40  # a wider one is split: 8 · 8 takes two thirds of the time of 64


class OrthoAdam(torch.optim.Optimizer):
    """Adam in a rotated basis, with decoupled weight decay.

    Args:
        params: a model; or named parameters, or groups of them. Without names all matrices are
            rotated on their axis 1, with a warning.
        lr, betas, eps, weight_decay: as in AdamW.
        rotation: "hadamard" (signs and a Walsh–Hadamard transform) or "haar" (a dense matrix for
            each weight, the paper's).
        seed: makes Q with the parameter's name and axis. A checkpoint holds it, not Q.
        axes: the rotated axis, 0 or 1, of parameters by name, where it should be another.

    Moments are float32, float64 for float64 parameters; weights of 16 bits round once a step.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rotation: str = "hadamard",
        seed: int = 0,
        axes: Mapping[str, int] | None = None,
    ) -> None:
        """Store the options, and choose each matrix's rotated axis by its name. Warn if there are
        no `axes` and no name is known.

        Raises:
            ValueError: the rotation is unknown.
        """
        if rotation not in ("hadamard", "haar"):
            raise ValueError(f"rotation={rotation!r} is not 'hadamard' or 'haar'")
        self.axes, self._kind, self._seed = dict(axes or {}), rotation, seed
        self._rotated: dict[Tensor, RotatedParameter] = {}
        if isinstance(params, nn.Module):
            for name, part in params.named_modules():
                # Transformers' GPT-2 stores (in, out): outputs are axis 1, inputs axis 0.
                if type(part).__name__ == "Conv1D":
                    self.axes.setdefault(f"{name}.weight", 1 if writes(f"{name}.weight") else 0)
            params = params.named_parameters()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        if not axes and not any(map(writes, self.axes)):
            warnings.warn(
                "OrthoAdam knows none of these names, and rotates all matrices on their axis 1: "
                "pass the model, or name those that write to the residual stream by axes=",
                stacklevel=2,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; choose the rotated axis of each of its matrices, unless `axes` has it.

        The rotations are described in the group's `rotations`, which checkpoints contain.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names")
        for number, parameter in enumerate(group["params"]):
            name = names[number] if names else f"parameter {len(self._rotated)}"
            # Without the prefixes that DDP ("module.") and torch.compile put before names.
            name = re.sub(r"(?<![^.])(?:module|_orig_mod)\.", "", name)
            axis = None
            if parameter.dim() == 2:
                axis = self.axes.setdefault(name, 0 if writes(name) else 1)
            self._rotated[parameter] = RotatedParameter(name, axis, self._kind, self._seed)
        group["rotations"] = [self._rotated[p].describe(p) for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient; return the closure's loss, None without a
        closure.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            # Parameters that one call of `adam_step` can take, by device, dtype and step count.
            batches: dict[Any, list[Any]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                rotated, state = self._rotated[parameter], self.state[parameter]
                rotated.make(parameter)
                if "step" not in state:
                    state["step"] = torch.tensor(0.0, device="cpu")
                    state["exp_avg"] = rotated.moment(parameter)
                    state["exp_avg_sq"] = rotated.moment(parameter)
                state["step"] += 1
                key = (parameter.device, state["exp_avg"].dtype, state["step"].item())
                batches.setdefault(key, []).append((rotated, parameter, state))
            options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            for (device, dtype, count), batch in batches.items():
                with torch.autocast(device.type, enabled=False):
                    # `turn` makes the rotated axis the last; `into` rotates the gradients.
                    adam_step(
                        [r.turn(p) for r, p, _ in batch],
                        [r.into(r.turn(p.grad).to(dtype).contiguous()) for r, p, _ in batch],
                        [r.turn(state["exp_avg"]) for r, _, state in batch],
                        [r.turn(state["exp_avg_sq"]) for r, _, state in batch],
                        [r.back for r, _, _ in batch],
                        count=count, **options,
                    )  # fmt: skip
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load a state that was saved with the same names, seed, axes and rotation.

        Moments keep their precision: torch alone would cast them to the parameter's dtype.

        Raises:
            ValueError: one of the four differs.
        """
        groups = list(zip(state_dict["param_groups"], self.param_groups, strict=True))
        if any(saved.get("rotations") != group["rotations"] for saved, group in groups):
            raise ValueError("the state was saved with other names, seeds, axes or rotations")
        super().load_state_dict(state_dict)
        # Torch has cast the moments: set them again from the saved ones.
        for saved, group in groups:
            for key, parameter in zip(saved["params"], group["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    if name != "step":
                        moment = self._rotated[parameter].moment(parameter)
                        self.state[parameter][name] = moment.copy_(value)


def writes(name: str) -> bool:
    """Return True for the name of a matrix that writes to the residual stream."""
    return WRITES.fullmatch(name) is not None


class RotatedParameter:
    """A parameter's name and rotated axis, None for none, and its Q, made at its first step.

    `into` rotates rows g (R, n) to g Qᵀ, `back` rows s̄ to s̄ Q.
    """

    def __init__(self, name: str, axis: int | None, kind: str, seed: int) -> None:
        self.name, self.axis, self.kind, self.seed = name, axis, kind, seed
        self.into = self.back = lambda rows: rows
        self.made_for: Any = None

    def describe(self, parameter: Tensor) -> list[dict[str, Any]]:
        """Return a list with one table, of what determines Q, for a checkpoint, which does not
        contain Q itself; [] if the parameter is not rotated.
        """
        if self.axis is None:
            return []
        entry = {"kind": self.kind, "seed": self.seed, "name": self.name, "axis": self.axis}
        return [entry | {"width": parameter.shape[self.axis]}]

    def make(self, parameter: Tensor) -> None:
        """Make Q, as the functions `into` and `back`, for the parameter's device and its moments'
        dtype, unless it is made already or no axis is rotated.
        """
        made_for = (parameter.device, moment_dtype(parameter))
        if self.axis is None or self.made_for == made_for:
            return
        width, self.made_for = parameter.shape[self.axis], made_for
        generator = generator_for(self.seed, self.name, self.axis)
        if self.kind == "haar":
            matrix = haar_matrix(width, generator).to(*made_for)
            self.into, self.back = (lambda rows: rows @ matrix.mT), (lambda rows: rows @ matrix)
        else:
            signs = random_signs(width, generator).to(*made_for)
            factors = transform_factors(width, *made_for)
            self.into = lambda rows: transform(rows * signs, factors)
            self.back = lambda rows: transform(rows, factors).mul_(signs)

    def turn(self, tensor: Tensor) -> Tensor:
        """Return a view whose rotated axis is the last."""
        return tensor.mT if self.axis == 0 else tensor

    def moment(self, parameter: Tensor) -> Tensor:
        """Return zeros in the parameter's shape for a moment, with the rotated axis contiguous in
        memory.
        """
        # Made with the rotated axis last, and then viewed in the parameter's shape.
        shape = self.turn(parameter).shape
        return self.turn(parameter.new_zeros(shape, dtype=moment_dtype(parameter)))


def moment_dtype(parameter: Tensor) -> torch.dtype:
    """Return float64 for a float64 parameter, else float32."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def adam_step(
    weights: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    back: list[Callable[[Tensor], Tensor]], *, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float, count: float,
) -> None:  # fmt: skip
    """Do one step of Adam on the weights θ, in place: update the moments by `grads`, which are
    rotated already, then θ ← (1 − η λ) θ − η Qᵀ [m̂ / (√v̂ + ε)].

    All lists have an entry for each weight; `back` has the functions that apply Qᵀ. `count` is t,
    the number of steps including this one. A weight in a narrower dtype than its moments is
    computed in theirs and rounded once.
    """
    beta1, beta2 = betas
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    del grads
    roots = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_mul_(roots, (1 - beta2**count) ** -0.5)  # √v̂ = √(v̄ / (1 − β₂ᵗ))
    torch._foreach_add_(roots, float(eps))
    steps = torch._foreach_div(exp_avgs, roots)
    del roots
    steps = [rotate_back(step) for rotate_back, step in zip(back, steps, strict=True)]
    wide = [weight.to(step.dtype) for weight, step in zip(weights, steps, strict=True)]
    if weight_decay != 0:
        torch._foreach_mul_(wide, 1 - float(lr) * weight_decay)
    # The steps were computed with m̄: m̂ = m̄ / (1 − β₁ᵗ).
    torch._foreach_add_(wide, steps, alpha=-float(lr) / (1 - beta1**count))
    for weight, updated in zip(weights, wide, strict=True):
        if updated is not weight:  # `to` copied a narrower weight
            weight.copy_(updated)


def generator_for(seed: int, name: str, axis: int) -> torch.Generator:
    """Return the CPU generator of one rotation, seeded by a hash of (seed, name, axis)."""
    digest = hashlib.sha256(f"{seed}\x1f{name}\x1f{axis}".encode()).digest()
    positive = int.from_bytes(digest[:8], "big") >> 1  # 63 bits
    return torch.Generator(device="cpu").manual_seed(positive)


def haar_matrix(width: int, generator: torch.Generator) -> Tensor:
    """Return a Haar-random matrix of O(n): QR with the signs of R (Mezzadri 2007, section 5)."""
    q, r = torch.linalg.qr(torch.randn(width, width, generator=generator, **EXACT))
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def random_signs(width: int, generator: torch.Generator) -> Tensor:
    """Return n independent fair signs, ±1 in float64 on the CPU."""
    return 2.0 * torch.randint(0, 2, (width,), generator=generator, device="cpu").double() - 1


def transform(rows: Tensor, factors: tuple[Tensor | int, ...]) -> Tensor:
    """Return F x for each row x of `rows` (R, n), with F = Fᵀ = F⁻¹ the Kronecker product of
    `factors`: matrices, or an int for the Hartley transform of that width, which goes by FFT.
    """
    shape = groups, width = rows.shape
    # A row is an array with an axis for each factor, and each factor acts on its own axis.
    for factor in factors:
        size = factor if isinstance(factor, int) else factor.shape[0]
        width //= size
        blocks = rows.reshape(groups, size, width)
        if isinstance(factor, int):
            spectrum = torch.fft.fft(blocks, dim=1, norm="ortho")
            transformed = spectrum.real - spectrum.imag  # Σ x (cos + sin)
        elif width == 1:  # the innermost factor: one product for all groups
            transformed = blocks[..., 0] @ factor
        else:
            transformed = torch.bmm(factor.expand(groups, size, size), blocks)
        rows, groups = transformed, groups * size
    return rows.reshape(shape)


@functools.cache
@torch.inference_mode(False)  # cached for later: autograd refuses tensors of inference mode
def transform_factors(width: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the Kronecker factors of the transform F of `width` channels, outermost first: each is
    a symmetric orthogonal matrix, or an int for a Hartley transform that goes by FFT.

    With width = odd · 2^k, F is (Hartley of the odd part) ⊗ (Walsh–Hadamard of 2^k). It is cut into
    factors of the sizes that multiply fastest.
    """
    power = width & -width  # the largest power of 2 that divides the width
    odd = width // power
    if odd > LARGEST_DENSE:  # too wide for a matrix: by FFT
        rest = transform_factors(power, device, dtype) if power > 1 else ()
        return (odd, *rest)
    if width <= LARGEST_FACTOR or power < TAIL:  # too small to cut off a factor of `TAIL`
        if width <= LARGEST_DENSE:
            return (_factor(odd, power, device, dtype),)
        return (_factor(odd, 1, device, dtype), _factor(1, power, device, dtype))
    # The innermost factor has the size `TAIL`. There remain the odd part and 2^bits.
    bits = (power // TAIL).bit_length() - 1  # power = 2^bits · TAIL
    sizes: list[tuple[int, int]] = []  # (odd part, power of 2) of each factor
    if odd << bits <= LARGEST_FACTOR or bits < 3:
        sizes.append((odd, 1 << bits))
    else:
        sizes.append((odd, 1))
        pieces = math.ceil(bits / 5)  # each of 2⁵ at most, as equal as they can be
        sizes += [(1, 2 ** (bits // pieces + (i < bits % pieces))) for i in range(pieces)]
    sizes.append((1, TAIL))
    return tuple(_factor(*size, device, dtype) for size in sizes if size != (1, 1))


def _factor(odd: int, power: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the orthogonal matrix (Hartley of size `odd`) ⊗ (Walsh–Hadamard of size `power`),
    computed in float64 and rounded once.
    """
    hadamard, pair = torch.ones(1, 1, **EXACT), torch.tensor([[1.0, 1.0], [1.0, -1.0]], **EXACT)
    while hadamard.shape[0] < power:
        hadamard = torch.kron(hadamard, pair)
    index = torch.arange(odd, **EXACT)
    # The remainder keeps angles below 2π, where cos and sin are accurate.
    angle = 2 * math.pi * torch.outer(index, index).remainder(odd) / odd
    kron = torch.kron(angle.cos() + angle.sin(), hadamard)
    return (kron / math.sqrt(odd * power)).to(device, dtype)
