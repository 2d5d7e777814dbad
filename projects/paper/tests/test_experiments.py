"""experiments.md has a row with the published figures for every experiment of the paper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lambda_det.classification.model import model_options
from lambda_det.modeling.specs import SPECS
from tests.classification.test_recipes import CONFIGS, RECIPE_NAMES, load_recipe_by_name

PAGE = Path(__file__).parents[1] / "experiments.md"
# What the paper (numbers of the conference version) and the article of the reproduction measured,
# and figures of theirs
EXPERIMENTS = {
    "Table 3": "25.6 76.9 15.0 78.4 16.0 78.9 28.1 77.6 33.0 77.0 25.8 77.7 18.0 77.4 23.3 20.5",
    "Table 4, accuracy": "78.4 77.9 78.0 78.1 77.5 77.4",
    "Table 4, throughput and memory": "1160 1.9 1640 0.95 1210 0.63 1100 960 4.8 440 120",
    "Table 5, throughput": "1620 170 180 6100 980 640 51 66 307 86.7 87.1",
    "Table 5": "86.7 87.1",
    "Tables 2, 6 and 7": "",
    "Table 8": "14.7 16.0 77.2 78.9",
    "Table 9": "68.8 78.1 78.4 14.9 5.0 11.9 12.0",
    "Table 10": "77.6 78.2 78.5 78.3 78.4 5.7 6.1 7.8 10.0 12.4 19.4",
    "Table 11": "78.4 78.1 78.0 70.0 76.2",
    "Table 12": "77.3 77.2 77.8 78.4 78.3 7240 1880 1280 1160 2200 4980 7160",
    "Table 13": "81.3 81.8 82.3 82.6 82.5 83.0 83.4 4600 4000 4040 2560 2780 2400 1480",
    "Table 14": "",
    "Table 15": "84.0 84.3 43",
    "Table 16": "84.0 34 38",
    "Table 17": "72.7 73.3 603 563",
    "Table 18": "77.4 79.2 80.8 81.9 82.5 83.2 83.8 84.2 84.4 84.5 84.7 84.9 "
    "82.1 83.4 84.7 85.4 86.1 86.5 86.7",
    "Figure 4": "0.058 2.25 3.2 4.4 1.6 2.3",
    "Appendix E.2": "38.4 4.8 0.625",
    "Appendix B": "",
    # Table 14's rows, box and mask AP of all, small, medium and large objects
    "ResNet-101": "48.2 29.9 50.9 64.9 42.6 24.2 45.6 60.0 49.4 31.7 52.2 65.6 43.5 25.9 46.5 60.8",
    "ResNet-152": "48.9 29.9 51.8 66.0 43.2 24.2 46.1 61.2 50.0 31.8 53.4 67.0 43.9 25.5 47.3 62.0",
    "with squeeze-and-excitation": "48.5 51.5 65.3 42.8 24.0 60.2 49.4 30.0 52.3 66.7 24.6 46.8",
    "ResNet-50": "84.6 23.5",
    "all 3x3 convolutions": "3.2 81.4 12.8",
    "five learning rates": "0.0005",
    "throughput of training": "981.93 1283.26 50.92 38.96 17 29 03 06 41 35 20",
}
ROWS = [row for row in PAGE.read_text("utf-8").splitlines() if row.startswith("| ")]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_it_has_its_row_with_the_published_figures(experiment):
    number = re.escape(experiment.removeprefix("Table "))
    named = (
        rf"Tables?\b[^|]*\b{number}\b" if experiment.startswith("Table ") else re.escape(experiment)
    )
    rows = [row for row in ROWS if re.search(named, row)]
    assert rows, experiment
    figures = set(re.findall(r"(?<![\d.])\d+(?:\.\d+)?(?![\d.]*\d)", " ".join(rows)))
    assert set(EXPERIMENTS[experiment].split()) <= figures


def _commands():
    """(recipe, KEY VALUE pairs) of every training in the tables of the page.

    A code span of one word that is no name is another value of the command before it.
    """
    page = PAGE.read_text("utf-8")
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## )", page, re.M | re.S))
    for section, names in (("ImageNet, 90 epochs", SPECS), ("ImageNet, 350 epochs", RECIPE_NAMES)):
        before = ("resnet50", "MODEL.NAME") if names is SPECS else ()
        for cell in re.findall(r"^\|[^|]*\|([^|]*)\|", sections[section], re.M)[2:]:
            words = []
            for span in re.findall("`(.*?)`", cell.replace(" PSEUDO`", "`")):
                first, *rest = span.split()
                if first in names:
                    words = [first, *rest]
                elif len(words) > 1 and not rest:
                    words = [*words[:-1], first]
                else:  # a tool, or a key in a sentence
                    continue
                yield (*before, *words)


COMMANDS = sorted(set(_commands()))


def test_the_page_has_a_command_for_every_trained_network():
    named = {
        load_recipe_by_name(f"imagenet/{name}.yaml", *pairs).MODEL.NAME for name, *pairs in COMMANDS
    }
    # Projects add networks with layers of other kinds
    own = {n for n, spec in SPECS.items() if not getattr(spec, "kind", "")}
    assert {n for n in own if SPECS[n].paper.top1 and "lambda_k" not in n} <= named
    files = {name for name, *_ in COMMANDS} | {"base", "350_epochs", "resnet50_lambda_c2345"}
    assert {path.stem for path in (CONFIGS / "imagenet").glob("*.yaml")} == files


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_describes_a_model(command):
    name, *pairs = command
    cfg = load_recipe_by_name(f"imagenet/{name}.yaml", *pairs)
    model_options(cfg)
    # "starting with LambdaResNet-350 at resolution 288x288" (Appendix F.3)
    depth = int(re.search(r"(\d+)", cfg.MODEL.NAME)[1])
    stops = name != "resnet50" and depth >= 350 and cfg.INPUT.SIZE >= 288
    assert bool(cfg.TEST.PATIENCE) == bool(cfg.DATA.HELD_OUT) == stops


def test_memory_by_the_formulas_of_the_paper():
    """Table 4 (a ResNet-50, 224x224, 128 images, 8 heads) and Appendix E.2, without a network."""
    gib = 2**30
    layers = {56: 3, 28: 4, 14: 6, 7: 3}  # of a ResNet-50, by the side of their maps
    k, images, heads, float32, bfloat16 = 16, 128, 8, 4, 2
    positions = {side**2: number for side, number in layers.items()}
    lambdas = sum(number * k * n**2 * float32 for n, number in positions.items())
    shared = sum(k * n**2 * float32 for n in positions)
    attention = sum(number * images * heads * n**2 * float32 for n, number in positions.items())
    axial = sum(number * 2 * images * heads * side**3 * float32 for side, number in layers.items())
    sizes = [size / gib for size in (lambdas, lambdas / 2, shared, attention, axial)]
    assert sizes == pytest.approx([1.92, 0.96, 0.625, 122.8, 4.82], rel=0.005)
    assert axial / 1e9 == pytest.approx(5.18, rel=0.002)
    hybrid = k * (320 // 16) ** 4 * bfloat16  # a lambda layer in c4 of LambdaResNet-420
    assert [8 * hybrid / 1e6, hybrid / 1e6] == [40.96, 5.12]
    pooled_after = {56: 4, 28: 4, 14: 6, 7: 2}  # as in the networks
    sizes = (number * k * side**4 * float32 / gib for side, number in pooled_after.items())
    assert sum(sizes) == pytest.approx(2.51, abs=0.005)
    assert 32 * heads * 400**2 * 8 * bfloat16 / 2**20 == 625
    page = PAGE.read_text("utf-8")
    assert all(text in page for text in ("1.92, 0.96, 0.625, 122.8, and 4.82", "40.96 MB and 5.12"))


def test_each_table_says_what_was_run():
    headers = [row for row in ROWS if row.startswith("| experiment |")]
    assert len(headers) == 4 and all(row.endswith("| here |") for row in headers)
