"""Models of transformers that pool keys or queries between or within their stages."""

from vit_references.checking import ONE_TOKEN, SCORES
from vit_references.mechanisms import pooled, pooled_by_module, subsampled_queries, tokens

from foreign_references.case import Case
from foreign_references.huggingface_whole import model
from foreign_references.places import by_stage, number_in

EVERY = r".*"
UNEVEN = (72, 104)
"""Grids of 18×26, 9×13 and 5×7 leave rows and columns over where keys are pooled."""
PYRAMID = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4]}
CONVOLUTIONS = {
    "queries": "convolution_projection_query.convolution_projection.convolution",
    "keys": "convolution_projection_key.convolution_projection.convolution",
}
LINEAR = {"image_size": 256, "linear_attention": True}

CASES: list[Case] = [
    model(
        "PvtModel",
        {**PYRAMID, "image_size": 64},
        layers={
            EVERY: by_stage(
                number_in(r"block\.(\d)"),
                [pooled(keys="sequence_reduction")] * 3 + [tokens(1)],
            )
        },
        image_size=(64, 64),
        note="keys pooled; CLS in the last stage",
    ),
    model(
        "PvtV2Model",
        {**PYRAMID, "image_size": 64},
        layers={EVERY: pooled(keys="spatial_reduction")},
        image_size=UNEVEN,
        gain=20,
    ),
    model(
        "PvtV2Model, linear",
        {**PYRAMID, **LINEAR},
        config="PvtV2Config",
        layers={EVERY: pooled_by_module},
        image_size=(256, 320),
        gain=20,
        note="keys pooled to 7×7, unevenly",
    ),
    model(
        "SegformerModel",
        PYRAMID,
        layers={EVERY: pooled(keys="sequence_reduction.sequence_reduction")},
        image_size=UNEVEN,
        gain=20,
        quick=True,
    ),
    model("GLPNModel", PYRAMID, layers={EVERY: pooled(keys="sr")}, image_size=UNEVEN, gain=20),
    model(
        "CvtModel",
        {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 2, 3]},
        layers={
            EVERY: by_stage(
                number_in(r"stages\.(\d)"), [pooled(**CONVOLUTIONS), pooled(**CONVOLUTIONS), pooled(1, **CONVOLUTIONS)]
            )
        },
        image_size=(72, 104),
        gain=16,
        note="keys by strided convolution; CLS in the last stage",
    ),
    model(
        "LevitModel",
        {
            "image_size": 224,
            "hidden_sizes": [32, 48, 64],
            "num_attention_heads": [2, 3, 4],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        layers={r".*module": tokens(), r"encoder\.stages\.\d\.layers\.\d+": subsampled_queries(2)},
        image_size=(224, 224),
        gain=1,
        note="between stages every other patch asks; position bias",
    ),
    model("MobileViTV2Model", {"image_size": 64}, skipped={EVERY: SCORES}, refused=SCORES),
    model(
        "SwiftFormerModel",
        {"image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [8, 16, 24, 32]},
        skipped={EVERY: ONE_TOKEN},
        image_size=(64, 64),
        refused=ONE_TOKEN,
    ),
]
