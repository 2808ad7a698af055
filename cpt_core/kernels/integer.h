// What makes float numbers of a product of codes, see integer.py. The compiler vectorises the loop.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "grid.h"

namespace {

// In place: the storage of `product` holds float32 afterwards. Rows of the tables are what follows the product's rows
// or columns, see integer.py.
void affine_(const Tensor& product, const Tensor& row_codes, const Tensor& row_values, const Tensor& column_codes,
             const Tensor& column_values) {
  const int64_t rows = product.size(0), columns = product.size(1);
  const auto table = [](const Tensor& t, int64_t height, int64_t length, at::ScalarType type) {
    TORCH_CHECK(t.is_contiguous() && t.scalar_type() == type && t.dim() == 2 && t.size(0) == height &&
                    t.size(1) == length,
                "a table of the wrong shape or type");
  };
  TORCH_CHECK(product.is_contiguous() && product.scalar_type() == at::kInt, "products are int32 without gaps");
  table(row_codes, 2, rows, at::kInt);
  table(row_values, 3, rows, at::kFloat);
  table(column_codes, 2, columns, at::kInt);
  table(column_values, 4, columns, at::kFloat);
  const int32_t *sum = row_codes.const_data_ptr<int32_t>(), *row_zero = sum + rows;
  const float *row_scale = row_values.const_data_ptr<float>(), *scaled = row_scale + rows, *row_rest = scaled + rows;
  const int32_t *zero = column_codes.const_data_ptr<int32_t>(), *column_sum = zero + columns;
  const float *scale = column_values.const_data_ptr<float>(), *rest = scale + columns, *both = rest + columns,
              *bias = both + columns;
  int32_t* p = product.mutable_data_ptr<int32_t>();
  at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, columns)), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      int32_t* row = p + m * columns;
      const int32_t s = sum[m], z = row_zero[m];
      const float a = row_scale[m], b = scaled[m], c = row_rest[m];
      for (int64_t n = 0; n < columns; ++n) {
        const float t = static_cast<float>(row[n] - zero[n] * s - z * column_sum[n]);
        const float y = (a * scale[n]) * t + b * rest[n] + c * both[n] + bias[n];
        std::memcpy(row + n, &y, sizeof y);
      }
    }
  });
}

}  // namespace
