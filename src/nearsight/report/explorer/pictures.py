"""Pictures as people see them, as text that a page can hold."""

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

LARGEST_SIDE = 224
"""In pixels: as large as they are drawn."""
FEW_PIXELS = 64 * 64
"""Up to so many are kept exactly: a compressed copy would hardly be smaller, and it blurs what is drawn enlarged."""


def data_uri(picture_HWC: NDArray[np.uint8]) -> str:
    picture = Image.fromarray(picture_HWC)
    picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE), Image.Resampling.LANCZOS)
    exact = picture.width * picture.height <= FEW_PIXELS
    file = io.BytesIO()
    picture.save(file, "PNG" if exact else "JPEG", **({"optimize": True} if exact else {"quality": 85}))
    return f"data:image/{'png' if exact else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"
