// Greedy non-maximum suppression.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hoverlens {

// How much two boxes overlap: intersection over union, or over the smaller of the two areas.
// The latter joins the halves of an object that a slice border has cut.
enum class Overlap { kUnion, kSmaller };

// Indices of the boxes to keep, by falling score, equal scores by rising index.
//
// boxes: n x 4 floats, x1 y1 x2 y2, any unit. scores: n floats. classes: n labels, or null for
// one class. A box is dropped if a kept box of its class overlaps it by MORE than `threshold`.
// Boxes with a coordinate that is not finite, or a NaN score, are never kept. Boxes without area
// neither suppress nor are suppressed. Stops after max_keep boxes.
//
// Overlaps are computed in double precision, so the result does not depend on the compiler or
// CPU. Needs no Python state; callers may run it from any thread, and may not change the arrays
// meanwhile. Throws std::bad_alloc only.
std::vector<std::int64_t> nms(const float* boxes, const float* scores, const std::int64_t* classes,
                              std::size_t n, double threshold, std::size_t max_keep,
                              Overlap overlap);

}  // namespace hoverlens
