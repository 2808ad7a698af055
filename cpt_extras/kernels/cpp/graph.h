// Operators of graph convolutions, see graph.py: a row at a time, so that what stands between the roundings costs no
// pass over the memory. Bit-identical to the plain chains; what is laid out otherwise goes there.

#pragma once

#include <tuple>

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

Extremes joined(const std::vector<Extremes>& parts) {
  Extremes all;
  for (const Extremes& part : parts) join(all, part);
  return all;
}

// Calls f(row, place, extremes) for all rows: `place` has room for one, `extremes` are to be extended. Returns those of
// all rows.
template <typename F>
Extremes over_rows(const Rows& rows, const F& f) {
  std::vector<Extremes> found(at::get_num_threads());
  at::parallel_for(0, rows.count, rows.grain, [&](int64_t begin, int64_t end) {
    std::vector<float> place(rows.length);
    Extremes e = found[at::get_thread_num()];
    for (int64_t row = begin; row < end; ++row) f(row, place, e);
    found[at::get_thread_num()] = e;
  });
  return joined(found);
}

// round(x * scale) + bias, one range per row or for the whole
Tensor round_rows(const Tensor& x, const optional<Tensor>& scale, const optional<Tensor>& bias, float levels,
                  bool whole) {
  const Rows rows(x);
  const int64_t n = rows.length;
  Tensor y = at::empty_like(x);
  const float *from = x.const_data_ptr<float>(), *by = numbers(scale), *add = numbers(bias);
  const auto row_of = [=](int64_t row, std::vector<float>& place) {
    return scaled(from + row * n, by ? by + row : nullptr, place);
  };
  Extremes all;
  if (whole) all = over_rows(rows, [&](int64_t row, auto& place, Extremes& e) { extend(e, row_of(row, place), n); });
  float* to = y.mutable_data_ptr<float>();
  over_rows(rows, [&](int64_t row, auto& place, Extremes&) {
    const float* in = row_of(row, place);
    float *out = to + row * n, low, width;
    Extremes e = all;
    if (!whole) extend(e, in, n);
    finish(e, low, width);
    round_near(in, out, n, steps_of(low, width, Grid{levels, false, std::nullopt}), levels);
    if (add)
      for (int64_t i = 0; i < n; ++i) out[i] += add[i];
  });
  return y;
}

// round(round(x) * scale) with one range for all, and the columns' sums of the first rounding
std::tuple<Tensor, Tensor> round_twice(const Tensor& x, const optional<Tensor>& scale, const Grid& first,
                                       const Grid& second) {
  const Rows rows(x);
  const int64_t n = rows.length;
  Tensor y = at::empty_like(x);
  const float *from = x.const_data_ptr<float>(), *by = numbers(scale);
  float *to = y.mutable_data_ptr<float>(), low, width;
  ranges(Layout::whole(x.numel()), from, &low, &width);
  Steps steps = steps_of(low, width, first);
  const Extremes again = over_rows(rows, [&](int64_t row, auto& place, Extremes& e) {
    float* out = to + row * n;
    round_line(from + row * n, out, n, steps, first, row * n);
    extend(e, scaled(out, by ? by + row : nullptr, place), n);
  });
  const Tensor sums = y.sum(0);
  finish(again, low, width);
  steps = steps_of(low, width, second);
  over_rows(rows, [&](int64_t row, auto& place, Extremes&) {
    float* out = to + row * n;
    round_line(scaled(out, by ? by + row : nullptr, place), out, n, steps, second, row * n);
  });
  return {y, sums};
}

// Sums of the rows of codes that edges lead from, in int32; what makes values of them is said in integer_reference.py.
template <typename Index>
Tensor sum_rows(const Tensor& codes, int64_t zero, float scale, float rest, const Tensor& indptr,
                const Tensor& indices) {
  constexpr int64_t AHEAD = 12, LINE = 64;
  const int64_t count = indptr.size(0) - 1, n = codes.size(1), edges = indices.size(0);
  Tensor y = at::empty({count, n}, codes.options().dtype(at::kFloat));
  const int8_t* from = codes.const_data_ptr<int8_t>();
  const Index *start = indptr.const_data_ptr<Index>(), *source = indices.const_data_ptr<Index>();
  float* to = y.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, GRAIN * count / std::max<int64_t>(1, n * edges));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> place(n);
    int32_t* sums = place.data();
    for (int64_t row = begin; row < end; ++row) {
      std::fill(place.begin(), place.end(), 0);
      for (int64_t e = start[row]; e < start[row + 1]; ++e) {
        if (e + AHEAD < edges) {  // the rows lie anywhere
          const int8_t* later = from + source[e + AHEAD] * n;
          for (int64_t i = 0; i < n; i += LINE) __builtin_prefetch(later + i);
        }
        const int8_t* k = from + source[e] * n;
        for (int64_t i = 0; i < n; ++i) sums[i] += k[i];
      }
      const int64_t degree = start[row + 1] - start[row];
      const float offset = static_cast<float>(degree) * rest;
      for (int64_t i = 0; i < n; ++i) {
        to[row * n + i] = scale * static_cast<float>(sums[i] - degree * zero) + offset;
      }
    }
  });
  return y;
}

}  // namespace
