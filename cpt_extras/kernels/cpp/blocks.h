// Rounding to number formats whose elements share a scale in blocks: microscaling (MX) formats and NVFP4.
//
// Bit-identical to format_rounding.py: the same operations in the same order.

#pragma once

#include "grid.h"

namespace {

constexpr int32_t EXPONENT_MASK = 0x7F800000, MAGNITUDE_MASK = 0x7FFFFFFF;
constexpr float MIN_POWER = 0x1p-127f, MAX_POWER = 0x1p127f;  // of a scale that is a power of two

// The values of an element: a minifloat, or whole numbers about 0.
struct Element {
  bool is_symmetric;
  int64_t max_exponent;
  float step, shift, min_power, max_power, largest;

  Element(int64_t mantissa, int64_t min_exponent, int64_t max_exponent, double largest, bool is_symmetric)
      : is_symmetric(is_symmetric),
        max_exponent(max_exponent),
        step(std::ldexp(1.f, -static_cast<int>(mantissa))),
        shift(std::ldexp(1.5f, 23 - static_cast<int>(mantissa))),
        min_power(std::ldexp(1.f, static_cast<int>(min_exponent))),
        max_power(std::ldexp(1.f, static_cast<int>(max_exponent))),
        largest(static_cast<float>(largest)) {}
};

inline float bounded(float y, float x, float largest) {
  y = y < -largest ? -largest : y;
  y = y > largest ? largest : y;
  return y + x * 0.f;  // infinity becomes NaN
}

template <bool NOISY, bool SYMMETRIC>
inline float nearest(float x, float noise, const Element& e) {
  float y;
  if constexpr (SYMMETRIC) {
    y = std::rint(x);
    if constexpr (NOISY) y = y + std::rint(x - y + noise);
  } else {
    float power = std::bit_cast<float>(std::bit_cast<int32_t>(x) & EXPONENT_MASK);
    power = power < e.min_power ? e.min_power : power;
    power = power > e.max_power ? e.max_power : power;
    const float magic = power * e.shift;
    y = (x + magic) - magic;
    if constexpr (NOISY) y = y + (((x - y) + noise * (power * e.step) + magic) - magic);
  }
  return bounded(y, x, e.largest);
}

// As format_rounding._power_of_two.
inline float power_of_two(float largest, const Element& e) {
  if (!std::isfinite(largest)) return std::numeric_limits<float>::quiet_NaN();
  const float power = std::bit_cast<float>(std::bit_cast<int32_t>(largest) & EXPONENT_MASK);
  const float shift = std::ldexp(1.f, -static_cast<int>(e.max_exponent));
  if (e.is_symmetric) return std::clamp(power, MIN_POWER, MAX_POWER) * shift;
  return std::clamp(power * shift, MIN_POWER, MAX_POWER);
}

// As format_rounding._two_scales.
inline float two_scales(float largest, float range_scale, const Element& e) {
  static const Element e4m3(3, -6, 8, 448.0, false);
  return nearest<false, false>(largest / e.largest / range_scale, 0.f, e4m3) * range_scale;
}

inline float largest_magnitude(const float* x, int64_t n) {
  int32_t most = 0;  // NaN ends up beyond infinity
  for (int64_t i = 0; i < n; ++i) {
    const int32_t v = std::bit_cast<int32_t>(x[i]) & MAGNITUDE_MASK;
    most = v > most ? v : most;
  }
  return std::bit_cast<float>(most);
}

template <bool NOISY, bool SYMMETRIC>
void round_scaled(const float* x, float* y, const float* scales, int64_t block, int64_t begin, int64_t end,
                  const optional<Key>& key, const Element& e) {
  float scale[CHUNK], drawn[CHUNK];
  uint16_t bits[CHUNK];
  int64_t row = begin / block, left = block - begin % block;  // elements of this block that are still to come
  for (int64_t at = begin; at < end; at += CHUNK) {
    const int64_t count = std::min(end - at, CHUNK);
    for (int64_t i = 0; i < count;) {
      const int64_t same = std::min(left, count - i);
      std::fill_n(scale + i, same, scales[row]);
      i += same;
      left -= same;
      if (left == 0) {
        ++row;
        left = block;
      }
    }
    if constexpr (NOISY) {
      draw(bits, count, at, 1, *key);
      for (int64_t i = 0; i < count; ++i) drawn[i] = noise(bits[i]);
    }
    for (int64_t i = 0; i < count; ++i) {
      const float divisor = scale[i] == 0.f ? 1.f : scale[i];
      y[at + i] = nearest<NOISY, SYMMETRIC>(x[at + i] / divisor, NOISY ? drawn[i] : 0.f, e) * scale[i];
    }
  }
}

// Rounds every row of a matrix (rows, block) with a scale of its own: a power of two, or, with the scale of a range
// (0-d, or one for every row), e4m3 times that.
Tensor round_blocks(const Tensor& x, const optional<Tensor>& range_scale, int64_t mantissa, int64_t min_exponent,
                    int64_t max_exponent, double largest, bool is_symmetric, const optional<Tensor>& key) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0 && x.scalar_type() == at::kFloat, "x must be a float32 matrix of blocks");
  TORCH_CHECK(!key || (key->numel() == 1 && key->scalar_type() == at::kLong), "the key must be one int64");
  const Element e(mantissa, min_exponent, max_exponent, largest, is_symmetric);
  const Tensor held = x.contiguous();
  const int64_t rows = x.size(0), block = x.size(1);
  Tensor range_scales, out = at::empty_like(held);
  if (range_scale) {
    range_scales = range_scale->contiguous();
    TORCH_CHECK(range_scales.scalar_type() == at::kFloat && (range_scales.numel() == 1 || range_scales.numel() == rows),
                "range_scale must be float32, with one element or one for every block");
  }
  optional<Key> noise_key;
  if (key) noise_key.emplace(*key->const_data_ptr<int64_t>());
  const bool is_one = !range_scale || range_scales.numel() == 1;
  const float* by_range = range_scale ? range_scales.const_data_ptr<float>() : nullptr;
  const float* from = held.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  std::vector<float> scales(rows);
  at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / block), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float most = largest_magnitude(from + row * block, block);
      scales[row] = by_range ? two_scales(most, by_range[is_one ? 0 : row], e) : power_of_two(most, e);
    }
    const auto round = noise_key ? (is_symmetric ? round_scaled<true, true> : round_scaled<true, false>)
                                 : (is_symmetric ? round_scaled<false, true> : round_scaled<false, false>);
    round(from, to, scales.data(), block, begin * block, end * block, noise_key, e);
  });
  return out;
}

}  // namespace
