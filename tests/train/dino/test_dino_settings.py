"""Settings of pretraining: what cannot be is refused by its own name, and what makes no number is no identity."""

import dataclasses
import json
import math
from collections.abc import Callable

import pytest

from nearsight.errors import InputError
from nearsight.train.dino import CropsConfig, DinoConfig, DinoProtocol, ImagesConfig
from nearsight.train.dino.views import global_augmentations, local_augmentations


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DinoProtocol(drop_path=1.0), r"^drop_path is 1\.0, but must lie in \[0, 1\)"),
        (lambda: DinoProtocol(drop_path=math.nan), "^drop_path is nan"),
        (lambda: CropsConfig(min_global_area=0.0), r"^min_global_area is 0\.0, but must be a share"),
        (lambda: CropsConfig(min_global_area=1.5), r"^min_global_area is 1\.5"),
        (lambda: CropsConfig(min_local_area=-0.1), r"^min_local_area is -0\.1"),
        (lambda: CropsConfig(max_local_area=math.nan), "^max_local_area is nan"),
        (lambda: CropsConfig(min_local_area=0.5), r"^min_local_area is 0\.5, above max_local_area, 0\.4"),
        (lambda: CropsConfig(brightness=-1.0), r"^brightness is -1\.0"),
        (lambda: CropsConfig(saturation=math.inf), "^saturation is inf"),
        (lambda: CropsConfig(hue=0.6), r"^hue is 0\.6, but must be at most 0\.5"),
        (lambda: CropsConfig(max_sigma=0.05), r"^max_sigma is 0\.05, but must be at least 0\.1"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_the_outermost_settings_make_views() -> None:
    """What is accepted here is accepted by the augmentations, too."""
    crops = CropsConfig(min_global_area=1.0, min_local_area=1e-9, max_local_area=1e-9, hue=0.5, max_sigma=0.1)
    assert len(global_augmentations(crops)) == 2
    assert len(local_augmentations(crops)) == 5
    without = CropsConfig(num_local=0, min_local_area=7.0)  # nothing is cropped so
    assert len(global_augmentations(without)) == 2


def test_test_images_are_no_part_of_the_identity() -> None:
    few, many = (DinoConfig(data=ImagesConfig(num_train=50, num_test=number)) for number in (10, None))
    assert few.identity == many.identity != DinoConfig(data=ImagesConfig(num_train=51, num_test=10)).identity
    assert DinoConfig.from_json(json.loads(json.dumps(few.to_json())), "config.json") == few


def test_whole_numbers_are_what_they_are_when_they_are_read_again() -> None:
    whole = DinoConfig(crops=CropsConfig(jitter_p=0, max_sigma=2), protocol=DinoProtocol(clip_norm=3, drop_path=0))
    again = DinoConfig.from_json(json.loads(json.dumps(whole.to_json())), "config.json")
    assert again.identity == whole.identity
    assert dataclasses.replace(whole, seed=1).identity != whole.identity
