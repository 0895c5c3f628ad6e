"""The projection head of DINO (Caron et al. 2021): an MLP with a bottleneck, then a cosine with each prototype.

Shape suffixes: N samples, D features, b channels of the bottleneck, P prototypes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NUM_LAYERS = 3


class DinoHead(nn.Module):
    """Three layers with GELU between them, an L2 norm, and prototypes of length 1.

    A weight-normed layer whose gain stays 1, as in the original: only the direction of a prototype counts.
    """

    def __init__(self, width: int, *, hidden: int, bottleneck: int, num_prototypes: int) -> None:
        super().__init__()
        widths = [width, *[hidden] * (_NUM_LAYERS - 1), bottleneck]
        layers: list[nn.Module] = []
        for position in range(_NUM_LAYERS):
            layer = nn.Linear(widths[position], widths[position + 1])
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])
        # Drawn as torch draws a linear layer; its scale has no effect but on how fast it turns.
        self.prototypes = nn.Parameter(torch.empty(num_prototypes, bottleneck).uniform_(-1, 1) * bottleneck**-0.5)

    def forward(self, features_ND: Tensor) -> Tensor:
        """Cosines [N, P] with the prototypes."""
        # Norms in float32: under autocast the MLP's output is in bfloat16.
        bottleneck_Nb = F.normalize(self.mlp(features_ND).float(), dim=-1)
        return F.linear(bottleneck_Nb, F.normalize(self.prototypes, dim=-1))
