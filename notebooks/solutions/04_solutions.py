"""Solutions of the exercises of 04_object_detection.ipynb: one way of many."""

import math

from cpt_lessons import exercises

# 1. All of the anchor is common, all of the object is covered by either: 0.444 lies between 0.4 and 0.5, left out.
overlap = 32**2 / 48**2


# 2. What is common, over what is covered by either.
def overlap_of(a, b):
    """Return the intersection over union of two boxes."""
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    of_a, of_b = ((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return width * height / (of_a + of_b - width * height)


# 3. 94,851 for 608 x 832.
def anchors(height, width):
    """Return the number of anchors of a picture."""
    return sum(9 * math.ceil(height / stride) * math.ceil(width / stride) for stride in (8, 16, 32, 64, 128))


# 5. 0.688 for the six detections of section 4.
def average_precision(hits, objects):
    """Return the mean over all objects of the best precision at which they are found, 0 for those never found."""
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    return sum(max(precisions[i:]) for i, hit in enumerate(hits) if hit) / objects


exercises.check("04.1", overlap)
exercises.check("04.2", overlap_of)
exercises.check("04.3", anchors)
exercises.check("04.5", average_precision)
