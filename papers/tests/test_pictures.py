"""Pictures of attention and hidden states."""

import polars as pl
import pytest
import torch

from probes.test_probes_streaming import explicit, make
from wakeful.errors import WakefulError
from wakeful.probes import exact
from wakeful.probes.base import SCHEMA, AttentionEvent, HiddenEvent, exact_rows
from wakeful.reports.charts import specification
from wakeful_papers.probes.pictures import (
    AttentionPictures,
    HiddenPicture,
    MeanAttention,
    attention_picture,
)
from wakeful_papers.reports.pictures import hidden_states


@pytest.mark.parametrize("window", [None, 20])
def test_picture_rows_keep_the_attention_they_have(window):
    heads = make(101, torch.float64, window=window)
    A = explicit(heads)[2]
    picture = attention_picture(heads, 2, 10)
    bins = torch.arange(101) * 10 // 101
    expected = torch.stack(
        [
            torch.stack([A[bins == i][:, bins == j].sum() for j in range(10)]) / (bins == i).sum()
            for i in range(10)
        ]
    )
    torch.testing.assert_close(picture, expected)
    torch.testing.assert_close(picture.sum(1), torch.ones(10, dtype=torch.float64))


def test_pictures_of_heads():
    torch.manual_seed(5)
    q = torch.randn(2, 4, 12, 8, dtype=torch.float64)
    probe = AttentionPictures(layers=[0, 2], heads=[1, 3], size=64)
    for layer in range(3):
        probe.see(AttentionEvent(layer, q, q[:, :2], q[:, :2], 0.3))
    pictures = probe.pictures()
    assert sorted(pictures) == [(0, 1), (0, 3), (2, 1), (2, 3)]
    A = torch.stack([exact.attention_weights(q[b], q[b, :2], scale=0.3) for b in range(2)])
    torch.testing.assert_close(pictures[2, 3], A[:, 3].mean(0))
    rows = probe.rows()
    assert rows.filter(layer=0, head=1, position="3,2")["value"].item() == pytest.approx(
        A[:, 1, 3, 2].mean().item()
    )


def test_pictures_of_short_sequences_of_several_lengths_have_no_mean():
    q = torch.randn(1, 2, 40, 8)
    for lengths in ((40, 20), (9, 9)):
        probe = AttentionPictures(size=16)
        for length in lengths:
            part = q[:, :, :length]
            probe.see(AttentionEvent(0, part, part, part, 0.3))
    with pytest.raises(WakefulError, match="pictures of 9 and of 16 tokens have no mean"):
        probe.see(AttentionEvent(0, q, q, q, 0.3))


def test_hidden_picture_is_the_mean_size_with_outliers_kept():
    probe = HiddenPicture(tokens=4, bins=3)
    assert probe.rows().is_empty()
    h = torch.zeros(1, 2, 6)
    h[0, 0, 3], h[0, 1, 0] = -8.0, 2.0
    probe.see(HiddenEvent(-1, 9 * h))  # the embedding, in no mean over layers
    probe.see(HiddenEvent(0, h, before=9 * h))
    probe.see(HiddenEvent(1, 2 * h, before=h))
    assert probe.picture().tolist() == [[0, 12, 0], [3, 0, 0]]
    assert probe.rows().filter(position="0,1")["value"].item() == 12


def test_mean_attention_is_of_all_heads_and_layers():
    torch.manual_seed(2)
    q = torch.randn(2, 1, 4, 12, 8, dtype=torch.float64)
    probe = MeanAttention(tokens=6)
    for layer in range(2):
        probe.see(AttentionEvent(layer, q[layer], q[layer], q[layer], 0.3))
    A = torch.stack([exact.attention_weights(part[0], part[0], scale=0.3) for part in q])
    torch.testing.assert_close(probe.picture(), A.mean((0, 1))[:6, :6], check_dtype=False)


def test_pictures_of_hidden_states_have_one_scale_and_holes_where_a_state_is_not_finite():
    cells = [(None, None, f"{n},{m}", "hidden_picture", "paper", 3.0) for n in range(2)
             for m in range(3)]  # fmt: skip
    rows = exact_rows(cells)
    alone, both = hidden_states([("", rows)]), hidden_states([("a", rows), ("b", rows)])
    assert alone is not None
    assert both is not None
    of_one = specification(alone)["encoding"]
    of_two = specification(both)["spec"]["encoding"]
    assert of_one["color"]["scale"] == of_two["color"]["scale"]
    assert of_one["color"]["scale"]["domain"] == [0, 10000]
    assert [each["title"] for each in of_one["tooltip"]] == ["position", "channel bin", "mean |x|"]
    holes = hidden_states([("", rows.with_columns(value=pl.lit(float("nan"))))])
    (lines,) = specification(holes)["datasets"].values()
    assert set(lines[0]["hundredths"]) == {None}
    assert hidden_states([("", pl.DataFrame(schema=SCHEMA))]) is None
