"""Families that have a softmax, but (but for some blocks of VOLO) no attention between places of the image."""

from vit_references.checking import CHANNELS, CLASS, ONE_TOKEN, SCORES, TALKING, Family
from vit_references.mechanisms import tokens

BLOCKS = r"blocks\.\d+\.attn"

FAMILIES = [
    Family(
        "cait_xxs24_224",
        (64, 64),
        settings={"img_size": 64, "depth": 2},
        skipped={BLOCKS: TALKING, r"blocks_token_only\.\d+\.attn": CLASS},
    ),
    Family("coat_tiny", (64, 64), settings={"img_size": 64}, skipped={r".*factoratt_crpe\d?": SCORES}),
    Family(
        "volo_d1_224",
        (64, 64),
        settings={"img_size": 64},
        layers={r"network\.[234]\..*\.attn": tokens()},
        skipped={r"network\.0\..*": ONE_TOKEN, r"post_network.*": CLASS},
        note="only behind the outlookers",
    ),
    Family(
        "xcit_nano_12_p16_224", settings={"img_size": (64, 96)}, skipped={BLOCKS: CHANNELS, r"cls_attn_blocks.*": CLASS}
    ),
    Family("edgenext_xx_small", skipped={r".*\.xca": CHANNELS}),
    Family("efficientvim_m1", skipped={r".*mixer": SCORES}),
    Family("mobilevitv2_050", (128, 192), skipped={r".*\.attn": SCORES}),
    Family("lambda_resnet26t", (128, 128), skipped={r".*self_attn": SCORES}),
    Family("gc_efficientnetv2_rw_t", (64, 96), skipped={r".*": SCORES}),
    Family("gcresnext26ts", (128, 128), skipped={r".*": SCORES}),
    Family("resnest14d", skipped={r".*rsoftmax": CHANNELS}),
    Family("skresnet18", skipped={r".*\.attn": CHANNELS}),
]
