"""What stands under the charts."""

PROFILES_OF_MODELS = (
    "The heads of each layer, from the most local to the least. Bands: ± one standard deviation over images. Dots: "
    "selected heads."
)
PROFILES_OF_STUDY = (
    "The heads of each layer, from the most local to the least, means over seeds. Bands: from the smallest to the "
    "largest seed. Dots: selected heads."
)
PLANE = (
    "Each point is a head. Lower left: it looks at a few patches close by. Upper right: far and everywhere. Drag over "
    "the plane, or type ranges, to select heads here and in all other charts; with the chart in focus, the arrow keys "
    "step through the heads."
)
HEATMAPS_OF_MODELS = "Dark is local (top) or focused (bottom), on the same two colour scales for all models."
HEATMAPS_OF_STUDY = (
    "Dark is local (top) or focused (bottom), on the same two colour scales for all conditions. With several seeds a "
    "column is a rank by distance and a cell the mean over seeds."
)
TRAINING = "Training losses compare only where augmentation and label smoothing are the same."
EFFECTS = (
    "Effects with their 95 % intervals: the mean with a factor minus the mean without it; for an interaction, half of "
    "what one factor changes in the other's effect. Grey: the interval holds 0."
)
