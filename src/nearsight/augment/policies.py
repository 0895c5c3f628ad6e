"""AutoAugment's learned policies, as torchvision has them.

A policy is a list of sub-policies; a sub-policy is two steps (operation, probability, magnitude bin of 10).
"""

from nearsight.augment.operations import Operation

Step = tuple[Operation, float, int]

_SHEAR_X, _SHEAR_Y = Operation.SHEAR_X, Operation.SHEAR_Y
_TRANSLATE_X, _TRANSLATE_Y, _ROTATE = Operation.TRANSLATE_X, Operation.TRANSLATE_Y, Operation.ROTATE
_BRIGHTNESS, _COLOR, _CONTRAST, _SHARPNESS = (
    Operation.BRIGHTNESS,
    Operation.COLOR,
    Operation.CONTRAST,
    Operation.SHARPNESS,
)
_POSTERIZE, _SOLARIZE, _INVERT = Operation.POSTERIZE, Operation.SOLARIZE, Operation.INVERT
_AUTOCONTRAST, _EQUALIZE = Operation.AUTOCONTRAST, Operation.EQUALIZE

POLICIES: dict[str, tuple[tuple[Step, Step], ...]] = {
    "imagenet": (
        ((_POSTERIZE, 0.4, 8), (_ROTATE, 0.6, 9)),
        ((_SOLARIZE, 0.6, 5), (_AUTOCONTRAST, 0.6, 0)),
        ((_EQUALIZE, 0.8, 0), (_EQUALIZE, 0.6, 0)),
        ((_POSTERIZE, 0.6, 7), (_POSTERIZE, 0.6, 6)),
        ((_EQUALIZE, 0.4, 0), (_SOLARIZE, 0.2, 4)),
        ((_EQUALIZE, 0.4, 0), (_ROTATE, 0.8, 8)),
        ((_SOLARIZE, 0.6, 3), (_EQUALIZE, 0.6, 0)),
        ((_POSTERIZE, 0.8, 5), (_EQUALIZE, 1.0, 0)),
        ((_ROTATE, 0.2, 3), (_SOLARIZE, 0.6, 8)),
        ((_EQUALIZE, 0.6, 0), (_POSTERIZE, 0.4, 6)),
        ((_ROTATE, 0.8, 8), (_COLOR, 0.4, 0)),
        ((_ROTATE, 0.4, 9), (_EQUALIZE, 0.6, 0)),
        ((_EQUALIZE, 0.0, 0), (_EQUALIZE, 0.8, 0)),
        ((_INVERT, 0.6, 0), (_EQUALIZE, 1.0, 0)),
        ((_COLOR, 0.6, 4), (_CONTRAST, 1.0, 8)),
        ((_ROTATE, 0.8, 8), (_COLOR, 1.0, 2)),
        ((_COLOR, 0.8, 8), (_SOLARIZE, 0.8, 7)),
        ((_SHARPNESS, 0.4, 7), (_INVERT, 0.6, 0)),
        ((_SHEAR_X, 0.6, 5), (_EQUALIZE, 1.0, 0)),
        ((_COLOR, 0.4, 0), (_EQUALIZE, 0.6, 0)),
        ((_EQUALIZE, 0.4, 0), (_SOLARIZE, 0.2, 4)),
        ((_SOLARIZE, 0.6, 5), (_AUTOCONTRAST, 0.6, 0)),
        ((_INVERT, 0.6, 0), (_EQUALIZE, 1.0, 0)),
        ((_COLOR, 0.6, 4), (_CONTRAST, 1.0, 8)),
        ((_EQUALIZE, 0.8, 0), (_EQUALIZE, 0.6, 0)),
    ),
    "cifar10": (
        ((_INVERT, 0.1, 0), (_CONTRAST, 0.2, 6)),
        ((_ROTATE, 0.7, 2), (_TRANSLATE_X, 0.3, 9)),
        ((_SHARPNESS, 0.8, 1), (_SHARPNESS, 0.9, 3)),
        ((_SHEAR_Y, 0.5, 8), (_TRANSLATE_Y, 0.7, 9)),
        ((_AUTOCONTRAST, 0.5, 0), (_EQUALIZE, 0.9, 0)),
        ((_SHEAR_Y, 0.2, 7), (_POSTERIZE, 0.3, 7)),
        ((_COLOR, 0.4, 3), (_BRIGHTNESS, 0.6, 7)),
        ((_SHARPNESS, 0.3, 9), (_BRIGHTNESS, 0.7, 9)),
        ((_EQUALIZE, 0.6, 0), (_EQUALIZE, 0.5, 0)),
        ((_CONTRAST, 0.6, 7), (_SHARPNESS, 0.6, 5)),
        ((_COLOR, 0.7, 7), (_TRANSLATE_X, 0.5, 8)),
        ((_EQUALIZE, 0.3, 0), (_AUTOCONTRAST, 0.4, 0)),
        ((_TRANSLATE_Y, 0.4, 3), (_SHARPNESS, 0.2, 6)),
        ((_BRIGHTNESS, 0.9, 6), (_COLOR, 0.2, 8)),
        ((_SOLARIZE, 0.5, 2), (_INVERT, 0.0, 0)),
        ((_EQUALIZE, 0.2, 0), (_AUTOCONTRAST, 0.6, 0)),
        ((_EQUALIZE, 0.2, 0), (_EQUALIZE, 0.6, 0)),
        ((_COLOR, 0.9, 9), (_EQUALIZE, 0.6, 0)),
        ((_AUTOCONTRAST, 0.8, 0), (_SOLARIZE, 0.2, 8)),
        ((_BRIGHTNESS, 0.1, 3), (_COLOR, 0.7, 0)),
        ((_SOLARIZE, 0.4, 5), (_AUTOCONTRAST, 0.9, 0)),
        ((_TRANSLATE_Y, 0.9, 9), (_TRANSLATE_Y, 0.7, 9)),
        ((_AUTOCONTRAST, 0.9, 0), (_SOLARIZE, 0.8, 3)),
        ((_EQUALIZE, 0.8, 0), (_INVERT, 0.1, 0)),
        ((_TRANSLATE_Y, 0.7, 9), (_AUTOCONTRAST, 0.9, 0)),
    ),
    "svhn": (
        ((_SHEAR_X, 0.9, 4), (_INVERT, 0.2, 0)),
        ((_SHEAR_Y, 0.9, 8), (_INVERT, 0.7, 0)),
        ((_EQUALIZE, 0.6, 0), (_SOLARIZE, 0.6, 6)),
        ((_INVERT, 0.9, 0), (_EQUALIZE, 0.6, 0)),
        ((_EQUALIZE, 0.6, 0), (_ROTATE, 0.9, 3)),
        ((_SHEAR_X, 0.9, 4), (_AUTOCONTRAST, 0.8, 0)),
        ((_SHEAR_Y, 0.9, 8), (_INVERT, 0.4, 0)),
        ((_SHEAR_Y, 0.9, 5), (_SOLARIZE, 0.2, 6)),
        ((_INVERT, 0.9, 0), (_AUTOCONTRAST, 0.8, 0)),
        ((_EQUALIZE, 0.6, 0), (_ROTATE, 0.9, 3)),
        ((_SHEAR_X, 0.9, 4), (_SOLARIZE, 0.3, 3)),
        ((_SHEAR_Y, 0.8, 8), (_INVERT, 0.7, 0)),
        ((_EQUALIZE, 0.9, 0), (_TRANSLATE_Y, 0.6, 6)),
        ((_INVERT, 0.9, 0), (_EQUALIZE, 0.6, 0)),
        ((_CONTRAST, 0.3, 3), (_ROTATE, 0.8, 4)),
        ((_INVERT, 0.8, 0), (_TRANSLATE_Y, 0.0, 2)),
        ((_SHEAR_Y, 0.7, 6), (_SOLARIZE, 0.4, 8)),
        ((_INVERT, 0.6, 0), (_ROTATE, 0.8, 4)),
        ((_SHEAR_Y, 0.3, 7), (_TRANSLATE_X, 0.9, 3)),
        ((_SHEAR_X, 0.1, 6), (_INVERT, 0.6, 0)),
        ((_SOLARIZE, 0.7, 2), (_TRANSLATE_Y, 0.6, 7)),
        ((_SHEAR_Y, 0.8, 4), (_INVERT, 0.8, 0)),
        ((_SHEAR_X, 0.7, 9), (_TRANSLATE_Y, 0.8, 3)),
        ((_SHEAR_Y, 0.8, 5), (_AUTOCONTRAST, 0.7, 0)),
        ((_SHEAR_X, 0.7, 2), (_INVERT, 0.1, 0)),
    ),
}
"""Cubuk et al. 2019, appendix; operations without a magnitude have bin 0."""
