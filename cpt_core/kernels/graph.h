// Operators of graph convolutions, see graph.py: a row at a time, so that what stands between the roundings costs no
// pass over the memory. Bit-identical to the plain chains; what is laid out otherwise goes there.

#pragma once

#include "grid.h"

namespace {

struct Rows {
  int64_t count, length, grain;

  explicit Rows(const Tensor& x)
      : count(x.size(0)), length(x.size(1)), grain(std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, x.size(1)))) {}
};

bool fits(const Tensor& x) { return x.dim() == 2 && x.numel() && x.is_contiguous() && x.scalar_type() == at::kFloat; }

bool fits_rows(const Tensor& x, const optional<Tensor>& scale) {
  return !scale || (scale->dim() == 2 && scale->size(0) == x.size(0) && scale->size(1) == 1 && fits(*scale));
}

bool fits_columns(const Tensor& x, const optional<Tensor>& bias) {
  return !bias || (bias->dim() == 1 && bias->size(0) == x.size(1) && bias->is_contiguous() &&
                   bias->scalar_type() == at::kFloat);
}

const float* numbers(const optional<Tensor>& x) { return x ? x->const_data_ptr<float>() : nullptr; }

// `row` times its scale, in `place`; itself where there is no scale
const float* scaled(const float* row, const float* scale, std::vector<float>& place) {
  if (!scale) return row;
  const float by = *scale;
  float* to = place.data();
  for (size_t i = 0; i < place.size(); ++i) to[i] = row[i] * by;
  return to;
}

// round(x * scale) + bias, one range per row
Tensor round_rows(const Tensor& x, const optional<Tensor>& scale, const optional<Tensor>& bias, float levels) {
  const Rows rows(x);
  const int64_t n = rows.length;
  Tensor y = at::empty_like(x);
  const float *from = x.const_data_ptr<float>(), *by = numbers(scale), *add = numbers(bias);
  float* to = y.mutable_data_ptr<float>();
  at::parallel_for(0, rows.count, rows.grain, [&](int64_t begin, int64_t end) {
    std::vector<float> place(n);
    for (int64_t row = begin; row < end; ++row) {
      const float* in = scaled(from + row * n, by ? by + row : nullptr, place);
      float *out = to + row * n, low, width;
      Extremes e;
      extend(e, in, n);
      finish(e, low, width);
      round_plain(in, out, n, low, scale_of(width, levels), levels);
      if (add)
        for (int64_t i = 0; i < n; ++i) out[i] += add[i];
    }
  });
  return y;
}

void round_row(const float* x, float* y, int64_t n, float low, float scale, const Grid& g, int64_t place) {
  if (g.key) {
    round_noisy(x, y, n, low, scale, g, place, 1);
  } else {
    round_plain(x, y, n, low, scale, g.levels);
  }
}

// round(round(x) * scale) with one range for all, and the columns' sums of the first rounding
std::tuple<Tensor, Tensor> round_twice(const Tensor& x, const optional<Tensor>& scale, const Grid& first,
                                       const Grid& second) {
  const Rows rows(x);
  const int64_t n = rows.length;
  Layout whole;
  whole.r2 = x.numel();
  float low, width;
  ranges(whole, x.const_data_ptr<float>(), &low, &width);
  Tensor y = at::empty_like(x);
  const float *from = x.const_data_ptr<float>(), *by = numbers(scale), step = scale_of(width, first.levels);
  float* to = y.mutable_data_ptr<float>();
  std::vector<Extremes> found(at::get_num_threads());
  at::parallel_for(0, rows.count, rows.grain, [&](int64_t begin, int64_t end) {
    std::vector<float> place(n);
    Extremes e = found[at::get_thread_num()];
    for (int64_t row = begin; row < end; ++row) {
      float* out = to + row * n;
      round_row(from + row * n, out, n, low, step, first, row * n);
      extend(e, scaled(out, by ? by + row : nullptr, place), n);
    }
    found[at::get_thread_num()] = e;
  });
  for (size_t i = 1; i < found.size(); ++i) join(found[0], found[i]);
  const Tensor sums = y.sum(0);
  finish(found[0], low, width);
  const float after = scale_of(width, second.levels);
  at::parallel_for(0, rows.count, rows.grain, [&](int64_t begin, int64_t end) {
    std::vector<float> place(n);
    for (int64_t row = begin; row < end; ++row) {
      float* out = to + row * n;
      round_row(scaled(out, by ? by + row : nullptr, place), out, n, low, after, second, row * n);
    }
  });
  return {y, sums};
}

}  // namespace
