// What makes float numbers of a product of codes, see integer_reference.py. The compiler vectorises the loop.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <bit>

#include "grid.h"

namespace {

// In place: the storage of `product` holds float32 afterwards. What the tables hold is said in integer_reference.py.
void affine_(const Tensor& product, const Tensor& row_codes, const Tensor& row_values, const Tensor& column_codes,
             const Tensor& column_values) {
  const int64_t rows = product.size(0), columns = product.size(1), total = column_codes.size(1);
  const int64_t groups = std::max<int64_t>(1, total / std::max<int64_t>(1, columns)), height = rows / groups;
  TORCH_CHECK(groups * columns == total && groups * height == rows, "tables of ", total, " columns for ", rows, " x ",
              columns, " sums");
  const auto check = [](const Tensor& t, int64_t height, int64_t length, at::ScalarType type) {
    TORCH_CHECK(t.is_contiguous() && t.scalar_type() == type && t.dim() == 2 && t.size(0) == height &&
                    t.size(1) == length,
                "a table of the wrong shape or type");
  };
  check(product, rows, columns, at::kInt);
  check(row_codes, 2, rows, at::kInt);
  check(row_values, 3, rows, at::kFloat);
  check(column_codes, 2, total, at::kInt);
  check(column_values, 4, total, at::kFloat);
  const int32_t *sum = row_codes.const_data_ptr<int32_t>(), *row_zero = sum + rows;
  const float *row_scale = row_values.const_data_ptr<float>(), *scaled = row_scale + rows, *row_rest = scaled + rows;
  const int32_t *zero = column_codes.const_data_ptr<int32_t>(), *column_sum = zero + total;
  const float *scale = column_values.const_data_ptr<float>(), *rest = scale + total;
  const float *value_sum = rest + total, *bias = value_sum + total;
  int32_t* p = product.mutable_data_ptr<int32_t>();
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, columns));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      int32_t* row = p + m * columns;
      const int64_t first = m / height * columns;
      const int32_t *zeros = zero + first, *sums = column_sum + first;
      const float *scales = scale + first, *rests = rest + first;
      const float *by = value_sum + first, *biases = bias + first;
      const int32_t s = sum[m], z = row_zero[m];
      const float a = row_scale[m], b = scaled[m], c = row_rest[m];
      for (int64_t n = 0; n < columns; ++n) {
        const float t = static_cast<float>(row[n] - zeros[n] * s - z * sums[n]);
        row[n] = std::bit_cast<int32_t>((a * scales[n]) * t + b * rests[n] + c * by[n] + biases[n]);
      }
    }
  });
}

}  // namespace
