"""Sizes and work of image models: exact counts, the formula against fvcore and the modules, the papers' tables."""

import pytest
import torch
from fvcore.nn import FlopCountAnalysis

from smlp.costs.counted import own_shares
from smlp.costs.operators import prepare, refuse_if_it_costs, unknown_operators
from smlp.ops.fast_paths import reference_ops
from smlp.vision.costs import ROOT, components, exaflops, multiply_adds, parameters
from smlp.vision.model import ImageModel
from smlp.vision.presets import PRESETS, ImageConfig, preset
from smlp.vision.table import JFT_IMAGES, table_rows, table_text

#: with 1000 classes; those of Mixer-B and L are also those of vit_jax
PARAMETERS = {
    "smlp_mixer_s32": 19_104_624,
    "smlp_mixer_s16": 18_528_264,
    "smlp_mixer_b32": 60_293_428,
    "smlp_mixer_b16": 59_880_472,
    "smlp_mixer_l32": 206_939_264,
    "smlp_mixer_l16": 208_196_168,
    "smlp_mixer_h14": 432_350_952,
    "smlp_gmlp_ti16": 5_867_328,
    "smlp_gmlp_s16": 19_422_656,
    "smlp_gmlp_b16": 73_075_392,
    "smlp_mixer_tiny": 1_132_170,
    "smlp_s_mixer": 75_722,
    "smlp_rp_s_mixer": 75_722,
    "smlp_sparse_mlp": 23_369_057,
    "smlp_rp_mixer_tiny": 1_132_170,
    "smlp_gmlp_tiny": 1_068_394,
}
WITH_CLASS_TOKEN = {"smlp_gmlp_ti16": 5_895_788, "smlp_gmlp_s16": 19_500_524, "smlp_gmlp_b16": 73_350_380}
#: epochs on JFT-300M and printed exaFLOPs (Tolstikhin et al., 2021, supplement, Table 2)
TRAINING = {"s32": (5, 9), "b32": (7, 41), "s16": (5, 34), "b16": (7, 161), "l32": (7, 145), "l16": (14, 1141)}
VARIANTS = {
    "untied": {"token_mixing": "untied"},
    "grouped": {"token_mixing": "grouped", "token_groups": 4},
    "views": {"token_mixing": "views", "token_groups": 4},
    "pyramid": {"pyramid": {0: 16, 1: 4}},
    "headless": {"num_classes": 0, "in_chans": 1},
}


def counted(config: ImageConfig) -> dict[str, tuple[int, int]]:
    """Return the parameters of the real modules, and the multiply-adds that fvcore counts for an image.

    The model has shapes and no weights: it takes neither memory nor time.

    Returns:
        By component, named as in :func:`components`.
    """
    with torch.device("meta"):
        model = ImageModel(config).eval()
        image = torch.empty(1, config.in_chans, config.img_size, config.img_size)
    names = [part.name for part in components(config)]
    sizes = {
        f"{ROOT}.{path}" if path else ROOT: sum(value.numel() for value in module.parameters())
        for path, module in model.named_modules()
    }
    with reference_ops():
        analysis = prepare(FlopCountAnalysis(model, (image,)))
        flops = {f"{ROOT}.{path}" if path else ROOT: count for path, count in analysis.by_module().items()}
        for name, by_module in unknown_operators(analysis).items():
            refuse_if_it_costs(name, by_module[""], flops[ROOT])
    own = [own_shares(by_module, names, ROOT) for by_module in (sizes, flops)]
    return {name: (int(own[0][name]), int(own[1][name])) for name in names}


def test_every_size_has_its_number_of_parameters():
    assert PARAMETERS.keys() == PRESETS.keys()
    assert {name: parameters(preset(name)) for name in PRESETS} == PARAMETERS
    assert {name: parameters(preset(name, pool="cls")) for name in WITH_CLASS_TOKEN} == WITH_CLASS_TOKEN


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("smlp_mixer_s32", {}),
        *((name, {"num_layers": 2}) for name in ("smlp_mixer_b16", "smlp_mixer_h14", "smlp_gmlp_b16")),
        ("smlp_gmlp_ti16", {"pool": "cls", "num_layers": 3}),
        *(("smlp_mixer_tiny", {**settings, "num_layers": 2}) for settings in VARIANTS.values()),
        ("smlp_gmlp_tiny", {"img_size": 8, "num_layers": 1}),
        ("smlp_rp_s_mixer", {"mixed_tokens": 40, "num_layers": 2}),
        ("smlp_sparse_mlp", {"mlp_width": 100, "num_layers": 2}),
        ("smlp_sparse_mlp", {"mlp_width": 50, "mlp_hidden": 100, "num_layers": 2}),
        ("smlp_mixer_tiny", {"mixed_tokens": 40, "num_layers": 2}),
        ("smlp_rp_mixer_tiny", {"num_layers": 1}),
    ],
)
def test_formula_modules_and_fvcore_agree(name, settings):
    config = preset(name, **settings)
    modules = counted(config)
    assert {name: size for name, (size, _) in modules.items()} == {
        part.name: part.other_params for part in components(config)
    }
    work = {part.name: config.num_tokens * part.flops_per_position for part in components(config)}
    assert {name: flops for name, (_, flops) in modules.items()} == pytest.approx(work)
    assert sum(work.values()) == pytest.approx(multiply_adds(config, norms=True))


@pytest.mark.parametrize("size", TRAINING)
def test_training_takes_the_operations_that_the_paper_prints(size):
    epochs, printed = TRAINING[size]
    assert exaflops(preset(f"smlp_mixer_{size}"), epochs * JFT_IMAGES) == pytest.approx(printed, rel=0.02)


def test_the_table_compares_with_every_printed_number():
    rows = [row for row in table_rows() if row["paper"] is not None]
    assert [len([row for row in rows if row["source"].endswith(f"Table {table}")]) for table in (1, 2, 11)] == [
        6,
        17,
        2,
    ]
    # what is printed with fewer than three digits is rounded by up to 5 %
    assert all(abs(row["difference"]) < (0.05 if row["paper"] < 30 else 0.015) for row in rows)
    lines = table_text().splitlines()
    assert any("73,075,392" in line for line in lines)
    (line,) = (
        line for line in lines if "smlp_gmlp_b16 (pool=cls)" in line and "parameters" in line and "Table 1 " in line
    )
    assert line.split()[-3:] == ["73.35", "73.4", "-0.1%"]
