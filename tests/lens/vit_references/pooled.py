"""Families whose queries or keys are fewer than the patches: pooled or picked from them."""

from vit_references.checking import TALKING, Family
from vit_references.mechanisms import pooled, pooled_along_sequence, pooled_by_module, subsampled_queries, tokens

STAGES = r"stages\.\d+\.blocks\.\d+\.attn"
LEVIT = {r".*blocks\.\d+\.attn": tokens(), r".*attn_downsample": subsampled_queries(2)}

FAMILIES = [
    Family(
        "pvt_v2_b0",
        (144, 208),
        layers={STAGES: pooled(keys="sr")},
        gain=12,
        note="keys pooled by strided convolution, which leaves out the last rows and columns",
    ),
    Family(
        "pvt_v2_b2_li",
        (256, 320),
        settings={"depths": (1, 1, 1, 1)},
        layers={STAGES: pooled_by_module},
        gain=12,
        note="keys pooled to 7×7, unevenly",
    ),
    Family(
        "twins_pcpvt_small",
        (128, 192),
        settings={"img_size": (128, 192), "depths": (1, 1, 1, 1)},
        layers={r"blocks\.\d+\.0\.attn": pooled(keys="sr")},
        note="keys pooled by strided convolution",
    ),
    Family(
        "mvitv2_tiny",
        (128, 128),
        settings={"img_size": 128},
        layers={STAGES: pooled(queries="pool_q", keys="pool_k")},
        gain=2,
        note="queries and keys pooled, relative position",
    ),
    Family(
        "mvitv2_small_cls",
        (128, 128),
        settings={"img_size": 128},
        layers={STAGES: pooled(1, queries="pool_q", keys="pool_k")},
        gain=2,
        slow=True,
        note="queries and keys pooled, relative position, CLS",
    ),
    Family(
        "nextvit_small",
        (128, 128),
        layers={r".*e_mhsa": pooled_along_sequence},
        note="keys pooled along the row-major sequence",
    ),
    Family(
        "levit_128s", (224, 224), layers=LEVIT, gain=0.3, note="between stages every other patch asks; position bias"
    ),
    Family("levit_conv_128s", (224, 224), layers=LEVIT, gain=0.3, slow=True, note="the same by convolutions"),
    Family(
        "efficientformerv2_s0",
        (224, 224),
        layers={r"stages\.3\.downsample\.attn": subsampled_queries(2)},
        skipped={r".*token_mixer": TALKING},
        note="between stages every other patch asks",
    ),
    Family(
        "mobilenetv4_hybrid_medium_075",
        (128, 192),
        layers={r"blocks\..*\.attn": pooled(keys="key.down_conv")},
        gain=0.3,
        note="one set of keys for all heads, pooled",
    ),
    Family(
        "mobilenetv5_base",
        (128, 192),
        layers={r"blocks\..*\.attn": tokens()},
        gain=1,
        slow=True,
        note="one set of keys for all heads",
    ),
]
