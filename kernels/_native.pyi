import numpy as np
from numpy.typing import NDArray

def nms(
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    classes: NDArray[np.int64] | None,
    threshold: float,
    max_keep: int,
    over_smaller: bool,
) -> NDArray[np.int64]: ...
