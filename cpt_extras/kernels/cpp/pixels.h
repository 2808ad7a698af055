// Sums over pixels, for the gradient of a convolution's weights on codes, see convolution.py.
//
// sum k_g (k_a - z_a) over the pixels of all images, for every channel of g and every tap (i, j, c) of a's windows. Four
// pixels of a row are one step: a vector holds them for 16 channels of g, as k_g + 128, and four neighbours of one
// channel of a, at any shift, stand beside each other in memory and are broadcast to all lanes.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "convolution.h"

namespace {

#ifdef CPT_VNNI

constexpr int64_t LANES = 16, STEP = 4, SUMS = 24;                        // SUMS: vectors in registers
constexpr int64_t MOST_PIXELS = (int64_t{1} << 31) / (255 * 128) - STEP;  // that an int32 can sum up
constexpr int64_t CACHED = 1 << 20;                                       // bytes that one round over all sums reads
static_assert(CACHED / LANES <= MOST_PIXELS);

inline int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A pixel's next 16 channels, or as many as there are and zeros.
inline __m128i channels(const int8_t* from, int64_t count) {
  if (count >= LANES) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  int8_t some[LANES] = {};
  std::memcpy(some, from, count);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(some));
}

// Four pixels of 16 channels: from [4][16] to [16][4].
inline void interleave(const __m128i (&x)[STEP], int8_t* to) {
  const __m128i a = _mm_unpacklo_epi8(x[0], x[1]), b = _mm_unpackhi_epi8(x[0], x[1]);
  const __m128i c = _mm_unpacklo_epi8(x[2], x[3]), d = _mm_unpackhi_epi8(x[2], x[3]);
  __m128i* y = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(y, _mm_unpacklo_epi16(a, c));
  _mm_storeu_si128(y + 1, _mm_unpackhi_epi16(a, c));
  _mm_storeu_si128(y + 2, _mm_unpacklo_epi16(b, d));
  _mm_storeu_si128(y + 3, _mm_unpackhi_epi16(b, d));
}

struct Packed {
  Tensor g_bytes, a_bytes;
  int8_t* g;  // (N * P, O / 16, Q / 4, 16, 4): codes + 128 as unsigned, and 0 behind the last pixel and channel
  int8_t* a;  // (N, H, C, phase, wide): codes, padded; a phase is a column modulo the stride
  int64_t blocks, quads, wide, high, line, image;

  Packed(const Windows& w, const int8_t* gradient, int64_t O, const int8_t* x, int64_t C, int8_t zero) {
    const int64_t Q = w.out[1], phases = w.stride[1];
    blocks = up(O, LANES) / LANES;
    quads = up(Q, STEP) / STEP;
    wide = up(quads * STEP + (w.kernel[1] - 1) * w.dilation[1] / phases, STEP);
    high = w.in[0] + 2 * w.padding[0];
    line = C * phases * wide;
    image = high * line;
    g_bytes = at::empty({w.N * w.out[0] * blocks * quads * LANES * STEP}, at::kChar);
    a_bytes = at::empty({w.N * image}, at::kChar);
    g = g_bytes.mutable_data_ptr<int8_t>();
    a = a_bytes.mutable_data_ptr<int8_t>();
    at::parallel_for(0, w.N * w.out[0], std::max<int64_t>(1, GRAIN / (Q * O)), [&](int64_t begin, int64_t end) {
      const __m128i sign = _mm_set1_epi8(-128);
      __m128i four[STEP];
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t b = 0; b < blocks; ++b) {
          for (int64_t q = 0; q < quads; ++q) {
            for (int64_t k = 0; k < STEP; ++k) {
              const int8_t* from = gradient + (row * Q + q * STEP + k) * O + b * LANES;
              four[k] = q * STEP + k < Q ? _mm_xor_si128(channels(from, O - b * LANES), sign) : _mm_setzero_si128();
            }
            interleave(four, g + ((row * blocks + b) * quads + q) * LANES * STEP);
          }
        }
      }
    });
    at::parallel_for(0, w.N * high, std::max<int64_t>(1, GRAIN / line), [&](int64_t begin, int64_t end) {
      const __m128i around = _mm_set1_epi8(zero);
      __m128i four[STEP];
      int8_t turned[LANES * STEP];
      for (int64_t row = begin; row < end; ++row) {
        const int64_t h = row % high - w.padding[0];
        const int8_t* from = x + (row / high * w.in[0] + h) * w.in[1] * C;
        for (int64_t f = 0; f < phases; ++f) {
          for (int64_t c = 0; c < C; c += LANES) {
            int8_t* to = a + row * line + (c * phases + f) * wide;
            for (int64_t t = 0; t < wide; t += STEP, to += STEP) {
              for (int64_t k = 0; k < STEP; ++k) {
                const int64_t v = (t + k) * phases + f - w.padding[1];
                const bool inside = h >= 0 && h < w.in[0] && v >= 0 && v < w.in[1];
                four[k] = inside ? channels(from + v * C + c, C - c) : around;
              }
              interleave(four, turned);
              for (int64_t l = 0; l < std::min(LANES, C - c); ++l) {
                std::memcpy(to + l * phases * wide, turned + l * STEP, STEP);
              }
            }
          }
        }
      }
    });
  }
};

// Adds to B blocks of 16 channels, for SUMS / B taps, the sums over rows [begin, end) of all images' rows.
template <int B>
CPT_VNNI void add_rows(const Windows& w, const Packed& x, int64_t block, const int64_t* taps, int64_t begin, int64_t end,
                       int64_t* out, int64_t out_block) {
  constexpr int T = SUMS / B;
  __m512i sums[B][T];
  for (int b = 0; b < B; ++b)
    for (int t = 0; t < T; ++t) sums[b][t] = _mm512_setzero_si512();
  const int64_t apart = x.quads * LANES * STEP, P = w.out[0];
  for (int64_t row = begin; row < end; ++row) {
    const int8_t* g = x.g + (row * x.blocks + block) * apart;
    const int8_t* a = x.a + row / P * x.image + row % P * w.stride[0] * x.line;
    for (int64_t q = 0; q < x.quads; ++q, g += LANES * STEP, a += STEP) {
      __m512i lanes[B];
      for (int b = 0; b < B; ++b) lanes[b] = _mm512_loadu_si512(g + b * apart);
#pragma GCC unroll 24
      for (int t = 0; t < T; ++t) {
        int32_t four;
        std::memcpy(&four, a + taps[t], sizeof four);
        const __m512i all = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) sums[b][t] = _mm512_dpbusd_epi32(sums[b][t], lanes[b], all);
      }
    }
  }
  for (int b = 0; b < B; ++b) {
    for (int t = 0; t < T; ++t) {
      int64_t* to = out + b * out_block + t * LANES;
      const __m512i low = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(sums[b][t]));
      const __m512i high = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(sums[b][t], 1));
      _mm512_storeu_si512(to, _mm512_add_epi64(_mm512_loadu_si512(to), low));
      _mm512_storeu_si512(to + 8, _mm512_add_epi64(_mm512_loadu_si512(to + 8), high));
    }
  }
}

// Sums of codes (N, H, W, C) over N, int32 (H, W, C).
Tensor over_batch(const Tensor& codes) {
  const int64_t each = codes.numel() / codes.size(0);
  const Tensor sums = at::zeros(codes.sizes().slice(1), codes.options().dtype(at::kInt));
  const int8_t* x = codes.const_data_ptr<int8_t>();
  int32_t* y = sums.mutable_data_ptr<int32_t>();
  at::parallel_for(0, each, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t n = 0; n < codes.size(0); ++n) {
      const int8_t* from = x + n * each;
      for (int64_t i = begin; i < end; ++i) y[i] += from[i];
    }
  });
  return sums;
}

// Sums of k - z over what every tap sees, int64 (I * J * C), from those over the batch.
Tensor tap_sums(const Windows& w, const Tensor& batch, int64_t C, int64_t zero) {
  const Tensor sums = at::zeros({w.kernel[0] * w.kernel[1] * C}, batch.options().dtype(at::kLong));
  const int32_t* x = batch.const_data_ptr<int32_t>();
  int64_t* to = sums.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < w.kernel[0]; ++i) {
    for (int64_t j = 0; j < w.kernel[1]; ++j, to += C) {
      for (int64_t p = 0; p < w.out[0]; ++p) {
        const int64_t h = p * w.stride[0] + i * w.dilation[0] - w.padding[0];
        if (h < 0 || h >= w.in[0]) continue;
        for (int64_t q = 0; q < w.out[1]; ++q) {
          const int64_t v = q * w.stride[1] + j * w.dilation[1] - w.padding[1];
          if (v < 0 || v >= w.in[1]) continue;
          const int32_t* from = x + (h * w.in[1] + v) * C;
          for (int64_t c = 0; c < C; ++c) to[c] += from[c] - w.N * zero;
        }
      }
    }
  }
  return sums;
}

Tensor pixel_products_vnni(const Windows& w, const Tensor& gradient, const Tensor& x, int8_t zero) {
  const int64_t O = gradient.size(3), C = x.size(3), rows = w.N * w.out[0];
  const Packed packed(w, gradient.const_data_ptr<int8_t>(), O, x.const_data_ptr<int8_t>(), C, zero);
  const int64_t count = w.kernel[0] * w.kernel[1] * C, pairs = packed.blocks % 2 == 0 ? 2 : 1, group = SUMS / pairs;
  std::vector<int64_t> taps(up(count, group), 0);  // what is behind the last is computed, too, and not used
  for (int64_t i = 0, t = 0; i < w.kernel[0]; ++i) {
    for (int64_t j = 0; j < w.kernel[1]; ++j) {
      const int64_t right = j * w.dilation[1], phase = right % w.stride[1], behind = right / w.stride[1];
      for (int64_t c = 0; c < C; ++c, ++t) {
        taps[t] = i * w.dilation[0] * packed.line + (c * w.stride[1] + phase) * packed.wide + behind;
      }
    }
  }
  const int64_t groups = static_cast<int64_t>(taps.size()) / group, out_block = groups * group * LANES;
  const Tensor out = at::zeros({packed.blocks, groups * group, LANES}, gradient.options().dtype(at::kLong));
  int64_t* to = out.mutable_data_ptr<int64_t>();
  const int64_t bytes = packed.blocks * packed.quads * LANES * STEP + w.stride[0] * packed.line;
  const int64_t at_once = std::max<int64_t>(1, CACHED / bytes);
  at::parallel_for(0, packed.blocks / pairs * groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t from = 0; from < rows; from += at_once) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t block = task / groups * pairs, first = task % groups * group;
        const auto add = pairs == 2 ? add_rows<2> : add_rows<1>;
        add(w, packed, block, taps.data() + first, from, std::min(rows, from + at_once),
            to + block * out_block + first * LANES, out_block);
      }
    }
  });
  const Tensor sums = out.transpose(1, 2).reshape({packed.blocks * LANES, -1}).slice(0, 0, O).slice(1, 0, count);
  // from (k_g + 128) k_a to k_g (k_a - z_a)
  const Tensor of_a = tap_sums(w, over_batch(x), C, zero), of_g = over_batch(gradient).view({-1, O}).sum(0);
  return at::cat({sums - int64_t{zero} * of_g.unsqueeze(1) - 128 * (of_a + w.N * w.out[0] * w.out[1] * zero),
                  of_a.unsqueeze(0)});
}

#endif

// The sums where this processor multiplies bytes, else nothing.
optional<Tensor> fast_pixel_products(const Tensor& gradient, const Tensor& x, const Tensor& zero, at::IntArrayRef kernel,
                                     at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation) {
  check_codes(gradient);
  check_codes(x);
  const Windows w(x.sizes(), kernel, stride, padding, dilation);
  TORCH_CHECK(gradient.size(0) == w.N && gradient.size(1) == w.out[0] && gradient.size(2) == w.out[1],
              "a gradient of another shape than the output");
#ifdef CPT_VNNI
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && w.out[1] < MOST_PIXELS) {
    return pixel_products_vnni(w, gradient, x, static_cast<int8_t>(zero.item<float>()));
  }
#endif
  return std::nullopt;
}

}  // namespace
