"""Labels that a classifier can be trained on and judged by."""

from torch import Tensor

from nearsight.errors import InputError


def check_classes_seen(train_labels_N: Tensor, test_labels_Q: Tensor, part: str = "test") -> None:
    """Every class that is asked for was there to be learned, or an error that says which was not."""
    unseen = sorted(set(test_labels_Q.tolist()) - set(train_labels_N.tolist()))
    if unseen:
        shown = ", ".join(map(str, unseen[:5])) + (", …" if len(unseen) > 5 else "")
        raise InputError(
            f"{'class' if len(unseen) == 1 else 'classes'} {shown} of the {part} samples "
            f"{'is' if len(unseen) == 1 else 'are'} never seen in training, so that nothing could predict "
            f"{'it' if len(unseen) == 1 else 'them'}; use more training samples"
        )
