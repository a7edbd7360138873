"""The plain definition of every route: formulas over lists counted from 1, nothing fused.

A `Model` reads a decoder's weights and runs it layer by layer: K[n], Q[n], V[n] are the projections
of layer n for every query head (grouped heads repeated), X[n] the hiddens, and a route is a
function U(m, n) that returns the attention output of layer n from them; `ROUTES` names each.
Shapes: B batch, H query heads, L tokens, d head width: heads are (B, H, L, d), hiddens (B, L, D).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from wakeful.model.decoder import Decoder


class Model:
    """One forward pass of a Llama-like decoder written out."""

    def __init__(self, decoder: Decoder, tokens: Tensor) -> None:
        self.w = decoder.state_dict()
        self.c = decoder.config
        self.N = decoder.config.num_layers
        self.H = decoder.config.shape.num_heads
        self.G = decoder.config.shape.num_kv_heads
        self.d = decoder.config.shape.head_width
        self.tokens = tokens
        self.weigh = WEIGHTS.get(decoder.config.normalizer)
        self.log_sink: Callable[[int], Tensor | None] = lambda n: None
        # Lists counted from 1; entry 0 of X is the embedding, of the others nothing.
        self.X: list[Tensor] = [self.w["embed.weight"][tokens]]
        self.h: list[Tensor | None] = [None]
        self.Q: list[Tensor | None] = [None]
        self.K: list[Tensor | None] = [None]
        self.V: list[Tensor | None] = [None]
        self.Vmixed: list[Tensor | None] = [None]
        # Of sublayers: block n's attention is 2n − 1, its feed-forward network 2n.
        self.f: list[Tensor] = [self.X[0]]

    def logits(
        self, U: Callable, x_after: Callable | None = None, reads: Callable | None = None
    ) -> Tensor:
        """Run the layers, with route `U(m, n)` and depth mix `x_after(m, n)`.

        `reads(m, s)` says instead what sublayer s reads (the final norm is s = 2N + 1): one stream,
        or those of query, key and value.
        """
        x = reads(self, 1) if reads else self.X[0]
        for n in range(1, self.N + 1):
            block = f"blocks.{n - 1}."
            three = x if isinstance(x, tuple) else (x, x, x)
            h, hk, hv = (self.norm(y, self.w[block + "attention_norm.weight"]) for y in three)
            self.h.append(h)
            self.Q.append(self.project(n, "query", h, self.H, turned=True))
            self.K.append(self.project(n, "key", hk, self.G, turned=True))
            self.V.append(self.project(n, "value", hv, self.G, turned=False))
            self.Vmixed.append(None)
            u = U(self, n).transpose(1, 2).flatten(2)
            self.f.append(
                self.after(block + "attention", u @ self.w[block + "attention.out.weight"].T)
            )
            y = reads(self, 2 * n) if reads else x + self.f[-1]
            g = self.norm(y, self.w[block + "mlp_norm.weight"])
            gate = g @ self.w[block + "mlp.gate.weight"].T
            up = g @ self.w[block + "mlp.up.weight"].T
            out = (gate / (1 + torch.exp(-gate)) * up) @ self.w[block + "mlp.down.weight"].T
            self.f.append(self.after(block + "mlp", out))
            self.X.append(y + self.f[-1])
            x = self.X[n]
            if reads:
                x = reads(self, 2 * n + 1)
            elif x_after:
                x = x_after(self, n)
        return self.norm(x, self.w["norm.weight"]) @ self.w["head.weight"].T

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.norm_eps) * weight

    def after(self, sublayer: str, out: Tensor) -> Tensor:
        """Apply the norm over a sublayer's output, where the placement has one."""
        weight = self.w.get(f"{sublayer}_output_norm.weight")
        return out if weight is None else self.norm(out, weight)

    def project(self, n: int, what: str, h: Tensor, heads: int, *, turned: bool) -> Tensor | None:
        name = f"blocks.{n - 1}.attention.{what}.weight"
        if name not in self.w:
            return None
        rows = (h @ self.w[name].T).unflatten(-1, (heads, self.d)).transpose(1, 2)
        if turned:
            rows = self.turn(rows)
        return torch.stack([rows[:, head * heads // self.H] for head in range(self.H)], dim=1)

    def turn(self, rows: Tensor) -> Tensor:
        """RoPE as a product of complex numbers, z_i = x_i + j x_{i + d/2}.

        The decoder keeps its table of angles in float32, so the factors are rounded to it here.
        """
        place = torch.arange(rows.shape[2], dtype=torch.float64)
        rate = self.c.rope_theta ** (-torch.arange(0, self.d, 2, dtype=torch.float64) / self.d)
        angle = place[:, None] * rate
        factor = torch.complex(angle.cos().float().double(), angle.sin().float().double())
        z = torch.complex(rows[..., : self.d // 2], rows[..., self.d // 2 :]) * factor
        return torch.cat([z.real, z.imag], dim=-1)

    def softmax(self, logits: Tensor, n: int) -> Tensor:
        """e^{x_i} / (e^s + Σ_j e^{x_j}), literally; −∞ for what is masked. Or as `WEIGHTS` says."""
        if self.weigh:
            return self.weigh(logits)
        e = torch.exp(logits)
        s = self.log_sink(n)
        extra = 0.0 if s is None else torch.exp(s if s.dim() == 3 else s[None, :, None])[..., None]
        return e / (extra + e.sum(-1, keepdim=True))

    def scores(self, Q: Tensor, K: Tensor, n: int) -> Tensor:
        """Q Kᵀ / √d, divided by n where the model says so, with what comes later masked."""
        L = Q.shape[2]
        later = torch.ones(L, L, dtype=torch.bool).triu(1)
        divisor = self.d**0.5 * (n if self.c.scale_logits_by_layer else 1)
        return (Q @ K.transpose(-1, -2) / divisor).masked_fill(later, -torch.inf)

    def A(self, n: int, Q: Tensor | None = None, K: Tensor | None = None) -> Tensor:
        Q, K = self.Q[n] if Q is None else Q, self.K[n] if K is None else K
        return self.softmax(self.scores(Q, K, n), n)


# ------------------------------------------------------------------------------ routes


def own(m: Model, n: int) -> Tensor:
    return m.A(n) @ m.V[n]


def weighted(weights: Callable[[Model, int], tuple], acts: Callable[[int], bool]) -> Callable:
    """V'_n = λ_{n,1} V_1 + λ_{n,2} V_n on the layers n where the route acts, V_n on others."""

    def U(m: Model, n: int) -> Tensor:
        first, second = weights(m, n) if acts(n) else (0.0, 1.0)
        m.Vmixed[n] = first * m.V[1] + second * m.V[n]
        return m.A(n) @ m.Vmixed[n]

    return U


def later(n: int) -> bool:
    return n >= 2


def plus(m: Model, n: int) -> tuple:
    e = torch.exp(m.w["route.share"])
    return m.w["route.total"] * (e / e.sum())[n - 2], 0.5


def sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def opening(m: Model, n: int, name: str) -> Tensor:
    """W h + b of the first channels of h that W reads."""
    W = m.w[f"{name}.gates.{n - 1}.weight"]
    return m.h[n][..., : W.shape[1]] @ W.T + m.w.get(f"{name}.gates.{n - 1}.bias", 0)


def for_queries(m: Model, g: Tensor) -> Tensor:
    """(B, L, G) to (B, H, L, 1)."""
    return torch.stack([g[..., head * m.G // m.H] for head in range(m.H)], 1).unsqueeze(-1)


def gate(m: Model, n: int, name: str) -> Tensor:
    return for_queries(m, sigmoid(opening(m, n, name)))


def gated(m: Model, n: int) -> Tensor:
    return m.A(n) @ (m.V[n] + gate(m, n, "route") * m.V[1]) if n >= 2 else own(m, n)


def gated_relu(m: Model, n: int) -> Tensor:
    if n == 1:
        return own(m, n)
    g = opening(m, n, "route")
    return m.A(n) @ (m.V[n] + for_queries(m, torch.where(g > 0, g, 0)) * m.V[1])


def gated_mix(m: Model, n: int) -> Tensor:
    g = gate(m, n, "route") if n >= 2 else 1.0
    return m.A(n) @ (g * m.V[n] + (1 - g) * m.V[1])


def value_embedding(every: int, peak: float) -> Callable:
    def U(m: Model, n: int) -> Tensor:
        if (m.N - n) % every:
            return own(m, n)
        E = m.w[f"route.tables.{n - 1}.weight"][m.tokens].unflatten(-1, (m.G, m.d))
        E = torch.stack([E[:, :, head * m.G // m.H] for head in range(m.H)], dim=1)
        return m.A(n) @ (m.V[n] + peak * gate(m, n, "route") * E)

    return U


def differential(name: str, V: Callable) -> Callable:
    """Queries' heads (p, m, j): pair p, softmax m, one of r; values' (p, i): half i of the pair."""

    def U(m: Model, n: int) -> Tensor:
        r = m.H // m.G
        A, v = m.A(n), V(m, n)
        q1, k1, q2, k2 = m.w[f"{name}.vectors"][n - 1]
        start = 0.8 - 0.6 * torch.e ** (-0.3 * (n - 1))
        share = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + start
        out: list[Tensor | None] = [None] * m.H
        for p in range(m.G // 2):
            both = torch.cat([v[:, 2 * p * r], v[:, (2 * p + 1) * r]], dim=-1)
            for j in range(r):
                u = (A[:, 2 * p * r + j] - share * A[:, (2 * p + 1) * r + j]) @ both
                size = torch.sqrt((u * u).mean(-1, keepdim=True) + 1e-5)
                u = (1 - start) * u / size * m.w[f"{name}.scales"][n - 1]
                out[2 * p * r + j], out[(2 * p + 1) * r + j] = u[..., : m.d], u[..., m.d :]
        return torch.stack(out, dim=1)

    return U


def output_gate(m: Model, n: int) -> Tensor:
    g = sigmoid(opening(m, n, "route")).unflatten(-1, (m.H, -1))  # (B, L, H, 1 or d)
    return own(m, n) * g.transpose(1, 2)


def softplus_gate(m: Model, n: int) -> Tensor:
    return own(m, n) * torch.log(1 + torch.exp(opening(m, n, "route"))).transpose(1, 2)[..., None]


def neutreno(m: Model, n: int) -> Tensor:
    return m.A(n) @ m.V[n] + 0.4 * (m.V[1] - m.V[n])


def resformer_neutreno(m: Model, n: int) -> Tensor:
    """NeuTRENO on the value that ResFormer has mixed."""
    mixed = 0.5 * m.V[n] + 0.5 * m.V[1] if n >= 2 else m.V[1]
    return m.A(n) @ mixed + 0.2 * (m.V[1] - mixed)


def neutreno_resformer(m: Model, n: int) -> Tensor:
    """The same whichever is written first: mixing comes before the attention, the pull after."""
    return resformer_neutreno(m, n)


def svformer(*anchors: int) -> Callable:
    """`anchors` counted from 1."""
    return lambda m, n: m.A(n) @ m.V[max(a for a in anchors if a <= n)]


def svformer_gated(m: Model, n: int) -> Tensor:
    """Anchors 1 and 3; the values of layer 3 take in V_1 through a gate, and layer 4 uses them."""
    if n < 3:
        return m.A(n) @ m.V[1]
    if n == 3:
        m.Vmixed[3] = m.V[3] + gate(m, 3, "route.parts.1.route") * m.V[1]
    return m.A(n) @ m.Vmixed[3]


def cla(c: int) -> Callable:
    def U(m: Model, n: int) -> Tensor:
        leader = (n - 1) // c * c + 1
        return m.A(n, K=m.K[leader]) @ m.V[leader]

    return U


def cla_resformer(m: Model, n: int) -> Tensor:
    """Pairs share keys and values; the second pair's values are ½ V_3 + ½ V_1."""
    leader = 1 if n <= 2 else 3
    values = m.V[1] if n <= 2 else 0.5 * m.V[3] + 0.5 * m.V[1]
    return m.A(n, K=m.K[leader]) @ values


ROUTES: dict[str, Callable] = {
    "own": own,
    "resformer": weighted(lambda m, n: (0.5, 0.5), later),
    'resformer(mode="constant", scale=2.0)': weighted(lambda m, n: (2.0, 1.0), later),
    'resformer(mode="learnable")': weighted(lambda m, n: m.w["route.weights"][n - 2], later),
    'resformer(mode="plus")': weighted(plus, later),
    "gated": gated,
    'gated(gate="relu")': gated_relu,
    'gated(gate="mix")': gated_mix,
    "gated(channels=12)": gated,
    'gated(gate="relu", channels=5)': gated_relu,
    "value_embedding": value_embedding(2, 3.0),
    "value_embedding(every=1, peak=2.0, channels=0)": value_embedding(1, 2.0),
    "value_embedding(every=3)": value_embedding(3, 3.0),
    "differential": differential("route", lambda m, n: m.V[n]),
    "output_gate(channels=12)": output_gate,
    "output_gate": output_gate,
    'output_gate(per="channel")': output_gate,
    'output_gate(gate="softplus")': softplus_gate,
    "neutreno": neutreno,
    "then(resformer, neutreno(lam=0.2))": resformer_neutreno,
    "then(neutreno(lam=0.2), resformer)": neutreno_resformer,
    "svformer": svformer(1),
    "svformer(anchors=[0, 2])": svformer(1, 3),
    "then(svformer(anchors=[0, 2]), on_layers([2], gated))": svformer_gated,
    "cla": cla(2),
    "cla(group=3)": cla(3),
    "then(cla(group=2), on_layers([2], resformer))": cla_resformer,
    'on_layers(range(1, 3), resformer(mode="constant", scale=5.0))': weighted(
        lambda m, n: (5.0, 1.0), lambda n: n in (2, 3)
    ),
    'on_layers([3], resformer(mode="learnable"))': weighted(
        lambda m, n: m.w["route.route.weights"][0], lambda n: n == 4
    ),
    'on_layers([1, 3], resformer(mode="plus"))': weighted(
        lambda m, n: (
            m.w["route.route.total"] * torch.softmax(m.w["route.route.share"], 0)[n // 2 - 1],
            0.5,
        ),
        lambda n: n in (2, 4),
    ),
}


# ------------------------------------------------------------------------- depth mixes


def denseformer(dilation: int, period: int) -> Callable:
    """x_n = Σ_j α_{n,j} X_j over j ≤ n with n − j a multiple of the dilation."""

    def x_after(m: Model, n: int) -> Tensor:
        if n % period:
            return m.X[n]
        terms = [j for j in range(n + 1) if (n - j) % dilation == 0]
        alpha = m.w[f"depth.weights.{n}"]
        assert len(alpha) == len(terms)
        return sum(a * m.X[j] for a, j in zip(alpha, terms, strict=True))

    return x_after


DEPTHS: dict[str, Callable] = {
    "residual": lambda m, n: m.X[n],
    "denseformer": denseformer(1, 1),
    "denseformer(dilation=2)": denseformer(2, 1),
    "denseformer(period=2)": denseformer(1, 2),
    "denseformer(dilation=2, period=2)": denseformer(2, 2),
}

# ------------------------------------------------------------------------- normalizers


def softpick(eps: float) -> Callable:
    def weigh(x: Tensor) -> Tensor:
        above = torch.exp(x) - 1
        total = torch.where(x.isfinite(), above.abs(), 0).sum(-1, keepdim=True)
        return torch.relu(above) / (total + eps * torch.exp(x).amax(-1, keepdim=True).clamp_min(1))

    return weigh


def softcap(cap: float) -> Callable:
    def weigh(x: Tensor) -> Tensor:
        e = torch.where(x.isfinite(), torch.exp(cap * torch.tanh(x / cap)), 0)
        return e / e.sum(-1, keepdim=True)

    return weigh


WEIGHTS: dict[str, Callable] = {
    "relu": lambda x: x.clamp_min(0) / x.isfinite().sum(-1, keepdim=True),
    "softpick": softpick(1e-6),
    "softpick(eps=4.0)": softpick(4.0),
    "softcap": softcap(50.0),
    "softcap(cap=2.0)": softcap(2.0),
    "sigmoid": lambda x: 1 / (1 + x.isfinite().sum(-1, keepdim=True) * torch.exp(-x)),
    "sigmoid(length=16)": lambda x: 1 / (1 + 16 * torch.exp(-x)),
}
"""What makes weights of logits, −∞ for what is masked, where they are not a softmax's."""
SINKS: dict[str, Callable] = {
    **dict.fromkeys(WEIGHTS, lambda m: lambda n: None),
    "softmax": lambda m: lambda n: None,
    "softmax1": lambda m: lambda n: torch.zeros(m.H, dtype=torch.float64),
    "softmax1(start=0.7)": lambda m: lambda n: torch.full((m.H,), 0.7).double(),
    "softmax1(learned=True)": lambda m: (
        lambda n: m.w[f"blocks.{n - 1}.attention.dot.normalizer.log_sinks"]
    ),
}
