"""Where things are in a picture."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.colors import Normalize

from lambda_paper import figures


def render(draw):
    """What ``draw`` puts on axes that fill a picture of 200x400 pixels."""
    figure = figures.new_figure(4, 2, "")
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    draw(axes)
    return figures.to_picture(figure).astype(int)


def test_a_cell_of_a_map_lies_over_its_part_of_the_image():
    picture = np.full((100, 200, 3), 200, np.uint8)  # drawn at twice its size
    values = np.zeros((5, 10))
    values[0, 9] = 1
    drawn = render(
        lambda axes: figures.overlay(
            axes, picture, values, norm=Normalize(0, 1), cmap="gray", title=""
        )
    )
    white = (drawn > 250).all(2)
    assert white[4:36, 364:396].all()  # rows 0 to 20 and columns 180 to 200
    white[:42, 358:] = False
    assert not white[4:196, 4:396].any()


def test_nothing_is_see_through_and_both_ends_are_not():
    picture = np.full((100, 200, 3), 100, np.uint8)
    values = np.array([[-1.0, 0.0, 1.0, 0.0]])
    drawn = render(
        lambda axes: figures.overlay(
            axes, picture, values, norm=Normalize(-1, 1), cmap="bwr", title=""
        )
    )
    left, none, right = (drawn[100, column] for column in (50, 150, 250))
    assert left.tolist() == [0, 0, 255] and right.tolist() == [255, 0, 0]
    assert len(set(none.tolist())) == 1 and abs(none[0] - 55) <= 2  # the image, darker


def test_position_and_cell_are_marked():
    picture = np.zeros((100, 200, 3), np.uint8)
    drawn = render(
        lambda axes: figures.overlay(
            axes,
            picture,
            np.zeros((5, 10)),
            norm=Normalize(0, 1),
            cmap="gray",
            title="",
            position=(50, 130),
            size=(5, 10),
        )
    )
    green = (drawn[:, :, 1] > 200) & (drawn[:, :, 0] < 60)
    assert green[96:105, 256:265].any()
    rows, columns = np.nonzero(green)
    assert (rows.min() + rows.max()) / 2 == pytest.approx(100, abs=2)  # of rows 40 to 60
    assert columns.min() == pytest.approx(240, abs=2) and columns.max() == pytest.approx(280, abs=2)


def test_tiles_are_laid_out_row_by_row():
    maps = np.arange(5)[:, None, None] * np.ones((5, 3, 2))
    shown, texts = [], []

    def draw(axes):
        names = [f"tile {k}" for k in range(5)]
        shown.append(figures.draw_tiles(axes, maps, names, 2, Normalize(0, 4)))
        texts.extend(axes.texts)

    render(draw)
    grid = np.ma.filled(shown[0].get_array(), np.nan)
    for index, text in enumerate(texts):
        x, y = (round(place + 0.5) for place in text.xy)
        assert (grid[y : y + 3, x : x + 2] == index).all() and text.get_text() == f"tile {index}"
        grid[y : y + 3, x : x + 2] = np.nan
    assert len(texts) == 5 and np.isnan(grid).all()


def test_scales():
    norm = figures.centred(np.array([-3.0, 1.0]))
    assert norm.vmin == -norm.vmax and 2.9 < norm.vmax <= 3
    assert figures.centred(np.zeros(4)).vmax == 1
    norm = figures.around_one(np.array([0.01, 4.0, 4.0]))
    assert float(norm(1.0)) == pytest.approx(0.5) and norm.vmax == pytest.approx(4)
    assert figures.logarithmic(np.array([0.0, 20.0])).vmin == pytest.approx(0.02)


@pytest.mark.slow
def test_embeddings_stand_in_the_row_of_their_depth(monkeypatch):
    kept = {}
    draw = figures.draw_tiles

    def keep(axes, maps, names, columns, norm):
        kept.update(maps=maps, names=names, columns=columns)
        return draw(axes, maps, names, columns, norm)

    monkeypatch.setattr(figures, "draw_tiles", keep)
    embedding = np.random.default_rng(0).normal(size=(2, 5, 3, 3, 3))  # [h, k, u, r, r]
    figures.embeddings(embedding, "")
    assert kept["columns"] == 5 and kept["names"][5 * 4 + 1] == "h 1, u 1, k 1"
    assert (kept["maps"][5 * 4 + 1] == embedding[1, 1, 1]).all()
    figures.embeddings(embedding[0, :, :1], "")
    assert kept["names"] == [f"k {k}" for k in range(5)] and kept["columns"] == 3
    assert (kept["maps"][4] == embedding[0, 4, 0]).all()


def test_reach_is_in_multiples_of_the_even_share(monkeypatch):
    kept = []
    overlay = figures.overlay

    def keep(axes, picture, values, **options):
        kept.append((values, options["title"]))
        return overlay(axes, picture, values, **options)

    monkeypatch.setattr(figures, "overlay", keep)
    keys = torch.full((1, 2, 1, 3, 4), 1 / 12, dtype=torch.float64)
    keys[0, 1] = 0
    keys[0, 1, 0, 2, 3] = 1
    figures.content_reach(np.zeros((30, 40, 3), np.uint8), keys, "")
    (mean, _), (even, first), (single, second) = kept
    assert np.allclose(even, 1) and first == "k 0: 12 positions"
    assert single[2, 3] == 12 and second == "k 1: 1 positions"
    assert mean[2, 3] == 6.5 and mean[0, 0] == 0.5
