"""torch.func over whole decoders, and what is differentiated twice."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers import some_tokens, tiny_decoder
from hf.models import VARIANTS
from wakeful.errors import WakefulError
from wakeful.model.attend import attend, causal_mask, explicit_attention
from wakeful.model.chunked import cross_entropy_of_rows
from wakeful.model.decoder import Decoder
from wakeful.model.positions import Rotary, turn_pairs
from wakeful.norms.rms import rms_norm

pytestmark = [  # torch's own, of its plain attention under vmap and forward mode
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
MORE = {
    "mudd": {"depth": "mudd"},
    "value embedding": {"route": "value_embedding"},
    "gated sinks": {"normalizer": "softmax1(learned=True)", "norm": "rmsnorm_single"},
    "capped": {"logit_cap": 5.0, "local_layers": (1, 3), "window": 4},
}


def losses(decoder: Decoder) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    def loss(parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
        given = {"reduction": "mean"}
        row = tokens[None]
        return functional_call(_Loss(decoder), parameters, (row[:, :-1], row[:, 1:]), given)

    return loss


class _Loss(torch.nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
        return self.decoder.loss(tokens, targets, reduction=reduction)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*VARIANTS, *MORE])
def test_gradients_of_each_sample_are_those_of_a_loop(name: str) -> None:
    decoder = tiny_decoder(**(VARIANTS | MORE)[name])
    tokens = some_tokens(3, 9)
    wrapped = _Loss(decoder)
    parameters = {key: p.detach() for key, p in wrapped.named_parameters()}
    found = vmap(grad(losses(decoder)), in_dims=(None, 0))(parameters, tokens)
    for number, row in enumerate(tokens):
        decoder.zero_grad()
        decoder.loss(row[None, :-1], row[None, 1:]).backward()
        for key, parameter in wrapped.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[key][number], expected, rtol=1e-10, atol=1e-12)


def test_models_side_by_side_are_those_alone() -> None:
    """An ensemble: vmap over the parameters, the sinks among them."""
    variant = {"normalizer": "softmax1(learned=True)"}
    decoders = [tiny_decoder(seed=seed, **variant) for seed in (0, 5)]
    stacked, buffers = torch.func.stack_module_state(decoders)
    tokens = some_tokens(2, 7)

    def logits(parameters: dict[str, Tensor], others: dict[str, Tensor]) -> Tensor:
        return functional_call(decoders[0], (parameters, others), (tokens,))

    found = vmap(logits)(stacked, buffers)
    for one, decoder in zip(found, decoders, strict=True):
        torch.testing.assert_close(one, decoder(tokens), rtol=0, atol=1e-12)


def heads(seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    return drawn(2, 5, 4, 3), drawn(2, 5, 2, 3), drawn(2, 5, 2, 3), drawn(4)


def by_definition(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    keep = causal_mask(5, 5, q.device)
    return explicit_attention(q, k, v, scale=0.6, sink=sink, keep=keep)[0]


def padded_by_kernel(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    keep = (
        causal_mask(5, 5, q.device)
        & torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])[:, None].bool()
    )
    return attend(q, k, v, scale=0.6, sink=sink.expand(2, 5, 4), keep=keep)


def by_kernel(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return attend(q, k, v, scale=0.6, sink=sink)


@pytest.mark.slow
@pytest.mark.parametrize("compute", [by_kernel, by_definition, padded_by_kernel])
def test_two_derivatives_are_those_of_finite_differences(compute: Callable[..., Tensor]) -> None:
    assert torch.autograd.gradcheck(compute, heads())
    assert torch.autograd.gradgradcheck(compute, heads())


def test_second_derivatives_by_a_sink_are_the_definition_s() -> None:
    """They were wrong without a word: the stock backward knows nothing of its own derivative."""
    found, expected = [], []
    for compute, values in ((by_kernel, found), (by_definition, expected)):
        inputs = heads()
        first = torch.autograd.grad(compute(*inputs).square().sum(), inputs, create_graph=True)
        loss = sum((gradient.square().sum() for gradient in first), torch.zeros(()))
        values += [*first, *torch.autograd.grad(loss, inputs)]
    assert expected[-1].abs().min() > 0.01
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_gradient_penalty_of_a_whole_decoder() -> None:
    """Its own gradient against finite differences of it, along a direction through all weights."""
    decoder = tiny_decoder(num_layers=2, normalizer="softmax1(learned=True)", route="svformer")
    tokens = some_tokens(2, 6)
    parameters = [p for p in decoder.parameters() if p.requires_grad]

    def penalty(*, create_graph: bool) -> Tensor:
        loss = decoder.loss(tokens[:, :-1], tokens[:, 1:])
        gradients = torch.autograd.grad(loss, parameters, create_graph=create_graph)
        return sum((g.square().sum() for g in gradients), torch.zeros(()))

    slope = torch.autograd.grad(penalty(create_graph=True), parameters)
    with torch.no_grad():
        ends = []
        for size in (1e-6, -2e-6):
            for parameter in parameters:
                parameter.add_(size)
            with torch.enable_grad():
                ends.append(penalty(create_graph=False).item())
    found = sum(float(g.sum()) for g in slope)
    assert found == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


def test_a_mean_by_rows_refuses_a_second_derivative() -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    loss = cross_entropy_of_rows(logits, torch.tensor([1, 2, 3, 4]), torch.ones(4).bool())
    with pytest.raises(WakefulError, match="create_graph=True"):
        torch.autograd.grad(loss, logits, create_graph=True)
    torch.autograd.grad(loss, logits)


@pytest.mark.slow
def test_hessians_by_sinks_and_forward_mode_are_the_definition_s() -> None:
    inputs = heads()

    def energy(compute: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda sink: compute(*inputs[:3], sink).square().sum()

    found, expected = (hessian(energy(by))(inputs[3]) for by in (by_kernel, by_definition))
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    direction = tuple(torch.ones_like(each) for each in inputs)
    for one, other in zip(
        jvp(by_kernel, inputs, direction), jvp(by_definition, inputs, direction), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_norms_and_rotations_are_transformed_to_any_order() -> None:
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)
    rotation = tuple(table.double() for table in Rotary(4, 9, theta=100.0)(slice(2, 7)))

    def normed(x: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-5)

    def exactly(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def turned(x: Tensor) -> Tensor:
        return turn_pairs(x, rotation)  # pyright: ignore[reportArgumentType]

    for compute, definition in ((normed, exactly), (turned, turned)):

        def curved(x: Tensor, of: Callable[[Tensor], Tensor] = compute) -> Tensor:
            return of(x).pow(3).sum()

        def plain(x: Tensor, of: Callable[[Tensor], Tensor] = definition) -> Tensor:
            return of(x).pow(3).sum()

        for order in (grad, hessian):
            found = vmap(vmap(vmap(order(curved))), 2, 2)(x) if compute is normed else None
            if found is not None:
                expected = vmap(vmap(vmap(order(plain))), 2, 2)(x)
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        leaf = x.clone().requires_grad_()
        expected = torch.autograd.grad(curved(leaf), leaf)[0]
        torch.testing.assert_close(grad(curved)(x), expected, rtol=1e-10, atol=1e-12)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(turned, x[:1].clone().requires_grad_())
        both = x[:1].clone().requires_grad_(), weight.clone().requires_grad_()
        assert check(lambda x, weight: rms_norm(x, weight, 1e-5), both)


def test_products_with_the_hessian_of_a_decoder() -> None:
    """By torch's plain attention, whose fused kernels have no second derivative."""
    decoder = tiny_decoder(num_layers=2, normalizer="softmax1(learned=True)")
    tokens = some_tokens(1, 6)[0]
    wrapped = _Loss(decoder)
    parameters = {key: p.detach() for key, p in wrapped.named_parameters()}
    direction = {key: torch.ones_like(p) for key, p in parameters.items()}
    loss = losses(decoder)

    def slope(amount: Tensor) -> Tensor:
        moved = {key: p + amount * direction[key] for key, p in parameters.items()}
        gradients = grad(loss)(moved, tokens)
        return sum((g.sum() for g in gradients.values()), torch.zeros(()))

    zero = torch.zeros((), dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        _, found = jvp(slope, (zero,), (zero + 1,))
        ahead, behind = slope(zero + 1e-6), slope(zero - 1e-6)
    assert found.item() == pytest.approx(((ahead - behind) / 2e-6).item(), rel=1e-5)
