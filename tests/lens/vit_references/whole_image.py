"""Families whose patches look at the whole image, patches in row-major order."""

from vit_references.checking import BATCH, CLASS, Family
from vit_references.mechanisms import tokens

BLOCKS = r"blocks\.\d+\.attn"
ANY_BLOCKS = r".*blocks\.\d+\.attn"
SMALL = {"img_size": (64, 96), "embed_dim": 96, "depth": 2, "num_heads": 3}

FAMILIES = [
    Family(
        "vit_tiny_patch16_224", settings={**SMALL, "reg_tokens": 4}, layers={BLOCKS: tokens(5)}, note="CLS, registers"
    ),
    Family(
        "vit_small_patch16_18x2_224",
        settings=SMALL,
        layers={r"blocks\.\d+\.attns\.\d+\.attn": tokens(1)},
        note="two attentions side by side",
    ),
    Family(
        "vit_pwee_patch16_reg1_gap_256",
        settings=SMALL,
        layers={r"blocks\.\d+": tokens(1)},
        note="attention and MLP in one projection",
    ),
    Family(
        "vit_dwee_patch16_reg1_gap_256",
        settings=SMALL,
        layers={BLOCKS: tokens(1)},
        maps_per_head=2,
        note="differential: both maps of a head, as two layers",
    ),
    Family("vit_base_patch16_siglip_224", settings=SMALL, layers={BLOCKS: tokens()}, skipped={"attn_pool": CLASS}),
    Family("beit_base_patch16_224", settings=SMALL, layers={BLOCKS: tokens(1)}, note="relative position bias"),
    Family(
        "deit_tiny_distilled_patch16_224", settings=SMALL, layers={BLOCKS: tokens(2)}, note="CLS, distillation token"
    ),
    Family(
        "eva02_tiny_patch14_224",
        (56, 84),
        settings={**SMALL, "img_size": (56, 84)},
        layers={BLOCKS: tokens(1)},
        note="RoPE",
    ),
    Family("vit_small_patch16_dinov3", settings=SMALL, layers={BLOCKS: tokens(5)}, note="RoPE, registers"),
    Family("vit_small_patch16_rope_mixed_224", settings=SMALL, layers={BLOCKS: tokens(1)}, note="learned RoPE"),
    Family("vit_pe_core_tiny_patch16_384", settings=SMALL, layers={BLOCKS: tokens(1)}, skipped={"attn_pool": CLASS}),
    Family("vit_relpos_small_patch16_224", settings=SMALL, layers={BLOCKS: tokens()}, note="relative position by MLP"),
    Family(
        "vit_relpos_medium_patch16_cls_224",
        settings=SMALL,
        layers={BLOCKS: tokens(1)},
        note="relative position by MLP, CLS",
    ),
    Family(
        "vit_srelpos_small_patch16_224",
        settings=SMALL,
        layers={BLOCKS: tokens()},
        note="one relative position for all blocks",
    ),
    Family(
        "vit_tiny_r_s16_p8_224",
        (128, 192),
        settings={**SMALL, "img_size": (128, 192)},
        layers={BLOCKS: tokens(1)},
        note="behind a ResNet",
    ),
    Family(
        "naflexvit_base_patch16_gap",
        settings={"embed_dim": 96, "depth": 2, "num_heads": 3},
        layers={BLOCKS: tokens(4)},
        note="registers",
    ),
    Family(
        "deepseek_vit_412m",
        (56, 84),
        settings={**SMALL, "img_size": (56, 84)},
        layers={ANY_BLOCKS: tokens()},
        note="RoPE",
    ),
    Family("qwen3_vit_88m", settings=SMALL, layers={ANY_BLOCKS: tokens()}, note="RoPE"),
    Family(
        "gemma4_vit_167m",
        (96, 144),
        settings={**SMALL, "img_size": (96, 144), "head_dim": 32, "intermediate_size": 192},
        layers={ANY_BLOCKS: tokens()},
        gain=1,
        note="RoPE",
    ),
    Family(
        "convit_tiny",
        (64, 64),
        settings={"img_size": 64, "depth": 4, "local_up_to_layer": 2},
        layers={r"blocks\.[01]\.attn": tokens(), r"blocks\.[23]\.attn": tokens(1)},
        note="gated by position; CLS from the third block on",
    ),
    Family(
        "crossvit_tiny_240",
        (240, 240),
        settings={"depth": ((1, 1, 0), (1, 2, 0))},
        layers={r"blocks\.\d+\.blocks\..*\.attn": tokens(1)},
        skipped={r"blocks\.\d+\.fusion\..*\.attn": CLASS},
        note="two branches with grids of their own",
    ),
    Family(
        "pit_ti_224",
        (112, 112),
        settings={"img_size": 112, "depth": (2, 2, 2)},
        layers={ANY_BLOCKS: tokens(1)},
        note="CLS, grid pooled between stages",
    ),
    Family("vitamin_small_224", settings={"img_size": (64, 96)}, layers={BLOCKS: tokens()}, note="behind convolutions"),
    Family("visformer_tiny", (224, 224), layers={r".*\.attn": tokens()}, note="channels first"),
    Family("cpubone_nano", (128, 192), layers={r"stages\..*\.main\.\d+": tokens()}),
    Family("lowformer_b0", (128, 192), layers={r"stages\..*attn\.main\.\d+": tokens()}),
    Family(
        "csatv2", (256, 384), layers={r"stages\.(2\.[78]|3\.[56])\.attn": tokens()}, skipped={r".*\.attn\.attn": BATCH}
    ),
    Family("efficientformer_l1", (224, 224), layers={r".*token_mixer": tokens()}, note="relative position bias"),
    Family("fastvit_sa12", (128, 192), layers={r".*token_mixer": tokens()}),
    Family("iformer_t", (128, 192), layers={r".*mixer\.module": tokens(axes="b")}, note="one head"),
    Family("shvit_s1", (224, 224), layers={r".*\.mixer\.m": tokens(axes="b")}, gain=8, note="one head"),
    Family("caformer_s18", layers={r".*token_mixer": tokens()}),
    Family(
        "coatnet_pico_rw_224",
        settings={"img_size": (64, 96)},
        layers={r".*\.attn": tokens()},
        note="relative position bias",
    ),
    Family(
        "botnet26t_256",
        (256, 256),
        layers={r"stages\.\d+\.\d+\.self_attn": tokens(axes="bh")},
        gain=1,
        slow=True,
        note="relative position, images and heads on one axis",
    ),
    Family(
        "resnet50_clip",
        (224, 224),
        layers={"head": tokens(1)},
        gain=1,
        slow=True,
        note="attention pooling that computes all queries",
    ),
]
