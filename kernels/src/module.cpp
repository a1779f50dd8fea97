// Python bindings. Argument checks with readable messages live in kernels/__init__.py; what is
// repeated here is only what keeps a direct caller from reading past an array.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hoverlens/nms.hpp"

namespace nb = nanobind;

namespace {

template <typename T, typename... Shape>
using Input = nb::ndarray<const T, nb::device::cpu, nb::c_contig, Shape...>;
using Indices = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

// Hands a vector to NumPy without copying; the array frees it.
Indices to_numpy(std::vector<std::int64_t> values) {
  auto owned = std::make_unique<std::vector<std::int64_t>>(std::move(values));
  std::vector<std::int64_t>* raw = owned.get();
  nb::capsule owner(raw, [](void* p) noexcept { delete static_cast<decltype(raw)>(p); });
  owned.release();
  return Indices(raw->data(), {raw->size()}, owner);
}

Indices nms(Input<float, nb::shape<-1, 4>> boxes, Input<float, nb::ndim<1>> scores,
            std::optional<Input<std::int64_t, nb::ndim<1>>> classes, double threshold,
            std::size_t max_keep, bool over_smaller) {
  const std::size_t n = boxes.shape(0);
  if (scores.shape(0) != n || (classes && classes->shape(0) != n)) {
    throw nb::value_error("boxes, scores and classes differ in length");
  }
  if (n > UINT32_MAX) throw nb::value_error("more than 2**32 - 1 boxes");
  const float* box_data = boxes.data();
  const float* score_data = scores.data();
  const std::int64_t* class_data = classes ? classes->data() : nullptr;
  std::vector<std::int64_t> keep;
  {
    nb::gil_scoped_release unlocked;
    keep = hoverlens::nms(box_data, score_data, class_data, n, threshold, max_keep,
                          over_smaller ? hoverlens::Overlap::kSmaller
                                       : hoverlens::Overlap::kUnion);
  }
  return to_numpy(std::move(keep));
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("nms", &nms, nb::arg("boxes").noconvert(), nb::arg("scores").noconvert(),
        nb::arg("classes").noconvert().none(), nb::arg("threshold"), nb::arg("max_keep"),
        nb::arg("over_smaller"));
}
