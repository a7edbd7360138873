"""The definitions against closed forms and hand-computed numbers."""

import math

import pytest
import torch

from wakeful.probes import exact

EYE = torch.eye(5, dtype=torch.float64)
UNIFORM = torch.ones(6, 6, dtype=torch.float64).tril() / torch.arange(1.0, 7.0).unsqueeze(1)
SINK = torch.zeros(7, 7, dtype=torch.float64).index_fill(1, torch.tensor(0), 1.0)


def test_importance_is_the_column_mean():
    A = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    assert exact.token_importance(A).tolist() == [0.625, 0.375]


@pytest.mark.parametrize(
    ("A", "expected"), [(EYE, math.log(5)), (SINK, 0.0)], ids=["diagonal", "sink"]
)
def test_entropy_of_spread_and_of_one_column(A, expected):
    assert exact.entropy(exact.token_importance(A)).item() == pytest.approx(expected)


def test_entropy_by_hand():
    assert exact.entropy(torch.tensor([3.0, 1.0])).item() == pytest.approx(
        0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    )


def test_top_importance_counts_from_one():
    a = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert [round(exact.top_importance(a, k).item(), 6) for k in (1, 2, 4)] == [0.4, 0.3, 0.1]


def test_first_key_share_and_mass_by_hand():
    A = torch.tensor([[1.0, 0, 0], [0.6, 0.4, 0], [0.2, 0.5, 0.3]], dtype=torch.float64)
    assert exact.first_key_share(A).item() == pytest.approx(2 / 3)
    assert exact.first_key_share(A, with_row_0=False).item() == pytest.approx(1 / 2)
    assert exact.first_key_mass(A).item() == pytest.approx(0.6)
    assert exact.first_key_mass(A, with_row_0=False).item() == pytest.approx(0.4)


def test_a_tie_is_no_sink():
    uniform = torch.ones(4, 4, dtype=torch.float64).tril()
    uniform /= uniform.sum(1, keepdim=True)
    assert exact.first_key_share(uniform).item() == 1 / 4  # row 0, which sees nothing else
    assert exact.first_key_share(uniform, with_row_0=False).item() == 0
    A = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.4, 0.3, 0.3]])
    assert exact.first_key_share(A, with_row_0=False).item() == 1 / 2


def test_a_row_without_weights_is_no_first_key_row():
    assert exact.first_key_share(torch.zeros(2, 2)).item() == 0


@pytest.mark.parametrize(
    ("A", "expected"), [(EYE, 5), (SINK, 1), (torch.ones(4, 4), 1)], ids=["eye", "sink", "ones"]
)
def test_rank_of_known_matrices(A, expected):
    assert exact.rank(A, 0.9).item() == expected


def test_rank_counts_energy_not_amplitude():
    A = torch.diag(torch.tensor([3.0, 1.0, 0.1], dtype=torch.float64))  # energies 9, 1, 0.01
    assert [exact.rank(A, tau).item() for tau in (0.89, 0.9, 0.9991)] == [1, 2, 3]


def test_mass_columns():
    A = torch.zeros(4, 4, dtype=torch.float64)
    A[:, 0], A[:, 1] = 0.9, 0.1
    assert exact.mass_columns(A, 0.9).item() == 1
    assert exact.mass_columns(A, 0.999).item() == 2


def test_value_spectrum_is_descending_and_its_sum_is_the_mean_square():
    v = torch.randn(33, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    spectrum = exact.value_spectrum(v)
    assert (spectrum.diff() <= 0).all()
    assert spectrum.sum().item() == pytest.approx(v.square().sum(1).mean().item())


def test_drain_and_peak():
    v = torch.tensor([[0.0, 1.0], [3.0, 4.0], [0.0, 5.0]])
    assert exact.value_drain(v).item() == pytest.approx(0.2)
    assert exact.residual_peak(v.flip(0)).item() == pytest.approx(5 / 3)


def test_similarity_of_parallel_and_orthogonal_tokens():
    assert exact.token_similarity(torch.ones(4, 3) * torch.arange(1, 5).unsqueeze(1)).item() == (
        pytest.approx(1)
    )
    assert exact.token_similarity(torch.eye(4)).item() == pytest.approx(0, abs=1e-7)
    opposite = torch.tensor([[1.0, 0.0], [-2.0, 0.0]])
    assert exact.token_similarity(opposite).item() == pytest.approx(-1)


def test_kurtosis_of_a_coin_a_gaussian_and_an_outlier():
    coin = torch.tensor([1.0, -1.0]).repeat(8)
    assert exact.kurtosis(coin).item() == pytest.approx(1)
    normal = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert exact.kurtosis(normal).item() == pytest.approx(3, abs=0.1)
    spike = torch.zeros(100, dtype=torch.float64)
    spike[3] = 1.0  # a Bernoulli(1/100): (1 − 3 p q) / (p q)
    assert exact.kurtosis(spike).item() == pytest.approx((1 - 3 * 0.0099) / 0.0099)


def test_max_activation():
    h = torch.tensor([[1.0, -7.0], [2.0, 3.0]])
    assert exact.max_activation(h).item() == 7
    assert exact.token_max_activation(h).tolist() == [7, 3]


def test_influence_and_angle():
    x = torch.eye(2, dtype=torch.float64)
    turned = x.flip(1)
    assert exact.block_influence(x, 3 * x).item() == pytest.approx(0)
    assert exact.block_influence(x, turned).item() == pytest.approx(1)
    assert exact.angular_distance(x, turned).item() == pytest.approx(0.5)
    assert exact.angular_distance(x, -x).item() == pytest.approx(1)


def test_weights_by_hand():
    q = k = torch.tensor([[[0.0], [1.0]]], dtype=torch.float64)
    e = math.e
    A = exact.attention_weights(q, k, scale=1.0)
    assert A[0].tolist() == [[1.0, 0.0], [pytest.approx(1 / (1 + e)), pytest.approx(e / (1 + e))]]
    A = exact.attention_weights(q, k, scale=1.0, sink=torch.zeros(1, dtype=torch.float64))
    assert A[0, 0].tolist() == [0.5, 0.0]
    assert A[0, 1].tolist() == [pytest.approx(1 / (2 + e)), pytest.approx(e / (2 + e))]
    A = exact.attention_weights(q, k, scale=1.0, window=1)
    assert A[0].tolist() == [[1.0, 0.0], [0.0, 1.0]]
