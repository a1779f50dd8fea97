#include "hoverlens/nms.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

namespace hoverlens {
namespace {

// Boxes tested at a time for any overlap at all; long enough to fill vector registers, short
// enough to stop early.
constexpr std::size_t kBlock = 16;

struct Box {
  float x1, y1, x2, y2;
};

// The kept boxes of one class, a coordinate an array so that the disjointness test vectorises.
struct Kept {
  std::vector<float> x1, y1, x2, y2;

  void add(const Box& box) {
    x1.push_back(box.x1);
    y1.push_back(box.y1);
    x2.push_back(box.x2);
    y2.push_back(box.y2);
  }
  Box at(std::size_t i) const { return {x1[i], y1[i], x2[i], y2[i]}; }
  std::size_t size() const { return x1.size(); }
};

double area(const Box& box) {
  return (static_cast<double>(box.x2) - box.x1) * (static_cast<double>(box.y2) - box.y1);
}

// Both boxes have area, which callers see to.
bool exceeds(const Box& a, const Box& b, double threshold, Overlap overlap) {
  const double width = static_cast<double>(std::min(a.x2, b.x2)) - std::max(a.x1, b.x1);
  const double height = static_cast<double>(std::min(a.y2, b.y2)) - std::max(a.y1, b.y1);
  if (width <= 0.0 || height <= 0.0) return false;
  const double shared = width * height;
  const double whole = overlap == Overlap::kSmaller ? std::min(area(a), area(b))
                                                    : area(a) + area(b) - shared;
  return shared / whole > threshold;
}

// Comparing float32 values is exact, so this test cannot disagree with the one in doubles.
bool touches(const Kept& kept, std::size_t from, std::size_t to, const Box& box) {
  const float *x1 = kept.x1.data(), *y1 = kept.y1.data();
  const float *x2 = kept.x2.data(), *y2 = kept.y2.data();
  int hit = 0;
  for (std::size_t i = from; i < to; ++i) {
    hit |= static_cast<int>(x1[i] < box.x2) & static_cast<int>(box.x1 < x2[i]) &
           static_cast<int>(y1[i] < box.y2) & static_cast<int>(box.y1 < y2[i]);
  }
  return hit != 0;
}

bool suppressed(const Kept& kept, const Box& box, double threshold, Overlap overlap) {
  for (std::size_t from = 0; from < kept.size(); from += kBlock) {
    const std::size_t to = std::min(from + kBlock, kept.size());
    if (!touches(kept, from, to, box)) continue;
    for (std::size_t i = from; i < to; ++i) {
      if (exceeds(kept.at(i), box, threshold, overlap)) return true;
    }
  }
  return false;
}

// Maps a score to an integer that rises as the score falls; -0.0 and 0.0 are one score.
std::uint32_t descending_key(float score) {
  score += 0.0f;
  std::uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  const std::uint32_t ascending = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
  return ~ascending;
}

}  // namespace

std::vector<std::int64_t> nms(const float* boxes, const float* scores, const std::int64_t* classes,
                              std::size_t n, double threshold, std::size_t max_keep,
                              Overlap overlap) {
  // Key above, index below: one integer sort gives the order and settles ties.
  std::vector<std::uint64_t> order;
  order.reserve(n);
  for (std::size_t i = 0; i < n; ++i) {
    const float* b = boxes + 4 * i;
    const bool finite =
        std::isfinite(b[0]) && std::isfinite(b[1]) && std::isfinite(b[2]) && std::isfinite(b[3]);
    if (!finite || std::isnan(scores[i])) continue;
    order.push_back(static_cast<std::uint64_t>(descending_key(scores[i])) << 32 | i);
  }
  std::sort(order.begin(), order.end());

  // Going by score over all classes at once lets max_keep end the work early.
  std::unordered_map<std::int64_t, Kept> by_class;
  std::vector<std::int64_t> keep;
  for (const std::uint64_t entry : order) {
    if (keep.size() >= max_keep) break;
    const std::size_t i = static_cast<std::uint32_t>(entry);
    const Box box{boxes[4 * i], boxes[4 * i + 1], boxes[4 * i + 2], boxes[4 * i + 3]};
    const bool has_area = box.x2 > box.x1 && box.y2 > box.y1;
    if (has_area) {
      Kept& kept = by_class[classes ? classes[i] : 0];
      if (suppressed(kept, box, threshold, overlap)) continue;
      kept.add(box);
    }
    keep.push_back(static_cast<std::int64_t>(i));
  }
  return keep;
}

}  // namespace hoverlens
