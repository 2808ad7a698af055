// What convolutions on codes need beside a library's integer convolution, see convolution.py for what it is.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "grid.h"
#include "transpose.h"

#ifdef CPT_SSE
#define CPT_VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))  // functions that ask the processor first
#endif

namespace {

// Sizes of a convolution of (N, H, W, ..) to (N, P, Q, ..): [0] of height, [1] of width.
struct Windows {
  int64_t N, in[2], out[2], kernel[2], stride[2], padding[2], dilation[2];

  Windows(at::IntArrayRef shape, at::IntArrayRef k, at::IntArrayRef s, at::IntArrayRef p, at::IntArrayRef d) {
    TORCH_CHECK(k.size() == 2 && s.size() == 2 && p.size() == 2 && d.size() == 2, "sizes are those of height and width");
    N = shape[0];
    for (int i = 0; i < 2; ++i) {
      in[i] = shape[i + 1];
      kernel[i] = k[i];
      stride[i] = s[i];
      padding[i] = p[i];
      dilation[i] = d[i];
      out[i] = (in[i] + 2 * p[i] - d[i] * (k[i] - 1) - 1) / s[i] + 1;
      TORCH_CHECK(p[i] >= 0 && s[i] > 0 && in[i] + 2 * p[i] > d[i] * (k[i] - 1), "a kernel that does not fit");
    }
  }
};

void check_codes(const Tensor& t) {
  TORCH_CHECK(t.dim() == 4 && t.scalar_type() == at::kChar && t.is_contiguous(), "codes are int8, channels last");
}

inline int32_t sum_of(const int8_t* x, int64_t n) {
  int32_t sum = 0;
#ifdef CPT_VNNI
  const __m128i sign = _mm_set1_epi8(-128);
  __m128i pair = _mm_setzero_si128();  // sums of bytes without a sign, two halves
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) {
    const __m128i bytes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)), sign);
    pair = _mm_add_epi32(pair, _mm_sad_epu8(bytes, _mm_setzero_si128()));
  }
  sum = _mm_cvtsi128_si32(pair) + _mm_cvtsi128_si32(_mm_unpackhi_epi64(pair, pair)) - 128 * static_cast<int32_t>(whole);
  x += whole;
  n -= whole;
#endif
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

Tensor window_sums(const Tensor& codes, const Tensor& zero, at::IntArrayRef kernel, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation) {
  check_codes(codes);
  const Windows w(codes.sizes(), kernel, stride, padding, dilation);
  const int64_t P = w.out[0], Q = w.out[1], C = codes.size(3), wide = w.in[1] + 2 * w.padding[1];
  const int32_t shift = static_cast<int32_t>(zero.item<float>()) * static_cast<int32_t>(C);
  const Tensor sums = at::zeros({w.N, P, Q}, codes.options().dtype(at::kInt));
  const int8_t* x = codes.const_data_ptr<int8_t>();
  int32_t* y = sums.mutable_data_ptr<int32_t>();
  at::parallel_for(0, w.N, std::max<int64_t>(1, GRAIN / (w.in[0] * w.in[1] * C)), [&](int64_t begin, int64_t end) {
    std::vector<int32_t> pixels((w.in[0] + 2 * w.padding[0]) * wide);  // zeros around
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t h = 0; h < w.in[0]; ++h) {
        int32_t* to = pixels.data() + (h + w.padding[0]) * wide + w.padding[1];
        for (int64_t v = 0; v < w.in[1]; ++v) to[v] = sum_of(x + ((n * w.in[0] + h) * w.in[1] + v) * C, C) - shift;
      }
      for (int64_t p = 0; p < P; ++p) {
        int32_t* to = y + (n * P + p) * Q;
        for (int64_t i = 0; i < w.kernel[0]; ++i) {
          for (int64_t j = 0; j < w.kernel[1]; ++j) {
            const int32_t* from = pixels.data() + (p * w.stride[0] + i * w.dilation[0]) * wide + j * w.dilation[1];
            if (w.stride[1] == 1) {
              for (int64_t q = 0; q < Q; ++q) to[q] += from[q];
            } else {
              for (int64_t q = 0; q < Q; ++q) to[q] += from[q * w.stride[1]];
            }
          }
        }
      }
    }
  });
  return sums;
}

// The tables of `affine_windows`, see convolution.py.
struct Epilogue {
  int64_t columns, period;
  const int32_t *sums, *zeros;
  const float *scales, *shifts;

  // Row m of a product; `y` may be where it is.
  template <typename T>
  void operator()(const T* product, float* y, int64_t m) const {
    const float *rests = scales + columns, *shift = shifts + m % period * columns;
    const int32_t *least = zeros + columns, s = sums[m];
    const float f = static_cast<float>(s);
#pragma GCC ivdep
    for (int64_t n = 0; n < columns; ++n) {
      const int32_t v = static_cast<int32_t>(product[n]) - least[n] - zeros[n] * s;
      y[n] = scales[n] * static_cast<float>(v) + rests[n] * f + shift[n];
    }
  }
};

template <typename T>
void affine_rows(const Tensor& product, const Tensor& out, const Epilogue& values) {
  const int64_t O = values.columns, grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, O));
  const T* x = product.const_data_ptr<T>();
  float* y = out.mutable_data_ptr<float>();
  at::parallel_for(0, product.size(0), grain, [=](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) values(x + m * O, y + m * O, m);
  });
}

// The same, a channel's pixels beside each other: a few rows at a time are turned over.
template <typename T>
void affine_planes(const Tensor& product, const Tensor& out, const Epilogue& values) {
  constexpr int64_t FEW = 64;
  const int64_t O = values.columns, pixels = out.size(2) * out.size(3), blocks = (pixels + FEW - 1) / FEW;
  const T* x = product.const_data_ptr<T>();
  float* y = out.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, GRAIN / (FEW * std::max<int64_t>(1, O)));
  at::parallel_for(0, out.size(0) * blocks, grain, [=](int64_t begin, int64_t end) {
    std::vector<float> rows(FEW * O);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t image = block / blocks, first = block % blocks * FEW, count = std::min(FEW, pixels - first);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t m = image * pixels + first + i;
        values(x + m * O, rows.data() + i * O, m);
      }
      turn(rows.data(), O, y + image * O * pixels + first, pixels, count, O);
    }
  });
}

void affine_windows(const Tensor& product, const Tensor& sums, const Tensor& zeros, const Tensor& scales,
                    const Tensor& shifts, const Tensor& out) {
  const int64_t rows = product.size(0), columns = product.size(1);
  const auto check = [](const Tensor& t, at::IntArrayRef shape, at::ScalarType type) {
    TORCH_CHECK(t.is_contiguous() && t.scalar_type() == type && t.sizes() == shape, "a table of the wrong shape or type");
  };
  const bool last = out.is_contiguous(at::MemoryFormat::ChannelsLast);
  TORCH_CHECK(product.is_contiguous() && (last || out.is_contiguous()), "a product with gaps");
  TORCH_CHECK(out.dim() == 4 && out.scalar_type() == at::kFloat && out.size(1) == columns && out.numel() == product.numel(),
              "a result of the wrong shape or type");
  check(sums, {rows}, at::kInt);
  check(zeros, {2, columns}, at::kInt);
  check(scales, {2, columns}, at::kFloat);
  check(shifts, {shifts.size(0), columns}, at::kFloat);
  const Epilogue values{columns, shifts.size(0), sums.const_data_ptr<int32_t>(), zeros.const_data_ptr<int32_t>(),
                        scales.const_data_ptr<float>(), shifts.const_data_ptr<float>()};
  const bool counted = product.scalar_type() == at::kInt;
  const auto run = last ? counted ? affine_rows<int32_t> : affine_rows<float>
                        : counted ? affine_planes<int32_t> : affine_planes<float>;
  run(product, out, values);
}

}  // namespace
