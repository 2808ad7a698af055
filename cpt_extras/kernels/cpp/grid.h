// Ranges and rounding of a CPU's tensors: in two passes, or in one where a range is a few rows.
//
// Bit-identical to cpt_core/quantization/rounding.py: the same operations in the same order, compiled without
// contraction to fused multiply-adds. The compiler vectorises the loops. NaN and infinity come out as there.
//
// A tensor is seen as it lies in memory, [r1][k1][r2][k2]: one range for every (k1, k2), shared over r1 and r2. Whole
// tensor: k1 = k2 = 1. Rows: r1 = k2 = 1. Positions: k2 = 1. Transposed keys of attention: r1 = 1.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transpose.h"

namespace {

using at::Tensor;
using std::optional;

constexpr float MIN_SCALE = 1e-8f;
constexpr int64_t GRAIN = 1 << 15;  // elements that are worth a thread

// --- noise -------------------------------------------------------------------------------------------------------

struct Key {
  uint32_t first = 0, second = 0;

  explicit Key(int64_t key) {
    uint64_t z = static_cast<uint64_t>(key) + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    first = static_cast<uint32_t>(z);
    second = static_cast<uint32_t>(z >> 32);
  }
};

// Random bits of a pair of neighbours, 16 for either; `start` is the key's first half, mixed with the upper half of the
// pair's number.
inline uint32_t hash(uint32_t pair, uint32_t start, uint32_t second) {
  uint32_t h = pair ^ start;
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h ^= second;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return h ^ (h >> 16);
}

// uniform in (-0.5, 0.5)
inline float noise(uint32_t bits) {
  return static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-16f + (0x1p-17f - 0.5f);
}

// --- ranges ------------------------------------------------------------------------------------------------------

// Extremes of a stretch, as integers in the order of the floats: reductions over integers are vectorised without
// assumptions about NaN, and NaN ends up beyond the infinities.
struct Extremes {
  int32_t low = std::numeric_limits<int32_t>::max(), high = std::numeric_limits<int32_t>::min();
};

inline int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }  // its own inverse

inline int32_t load(const float* x) { return ordered(std::bit_cast<int32_t>(*x)); }

inline float value(int32_t order) { return std::bit_cast<float>(ordered(order)); }

inline void extend(Extremes& e, const float* x, int64_t n) {
  int32_t low = e.low, high = e.high;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t v = load(x + i);
    low = v < low ? v : low;
    high = v > high ? v : high;
  }
  e.low = low;
  e.high = high;
}

inline void join(Extremes& e, const Extremes& other) {
  e.low = std::min(e.low, other.low);
  e.high = std::max(e.high, other.high);
}

inline void finish(const Extremes& e, float& low, float& width) {
  constexpr int32_t infinity = 0x7F800000;
  if (e.high > infinity || e.low < ordered(static_cast<int32_t>(0xFF800000))) {
    low = width = std::numeric_limits<float>::quiet_NaN();
  } else {
    low = value(e.low);
    width = value(e.high) - low;
  }
}

inline float scale_of(float width, float levels) {
  const float s = width / levels;
  return s < MIN_SCALE ? MIN_SCALE : s;  // NaN stays NaN
}

// --- rounding ----------------------------------------------------------------------------------------------------

struct Grid {
  float levels;
  bool clip;
  optional<Key> key;
  bool zero = false;  // whether it has a zero point
};

// A grid as layers name it: which elements share a range, and "+zero" where 0 is to be on it.
struct GridName {
  std::string granularity;
  bool zero;

  explicit GridName(std::string_view name) : zero(name.ends_with("+zero")) {
    granularity = name.substr(0, name.size() - (zero ? 5 : 0));
  }
};

// How the elements of a range are rounded: k = rint((x - low) / scale), clipped to [least, most].
struct Steps {
  float low, scale, least, most;
};

constexpr float INF = std::numeric_limits<float>::infinity();

inline Steps steps_of(float low, float width, const Grid& g) {
  if (!g.zero) return {low, scale_of(width, g.levels), g.clip ? 0.f : -INF, g.clip ? g.levels : INF};
  // as rounding.round_with_zero_point
  const float high = low + width;
  const float top = high < 0.f ? 0.f : high, bottom = low > 0.f ? 0.f : low;  // NaN stays NaN
  const float scale = scale_of(top - bottom, g.levels), nearest = std::rint(-bottom / scale);
  const float zero = nearest > g.levels ? g.levels : nearest;
  return {0.f, scale, -zero, g.levels - zero};
}

// What is written of a grid point k, a whole number: its value, or its code, centred so that 8 bits fit.
inline void put(float& y, float k, float low, float scale, float) { y = k * scale + low; }

inline void put(int8_t& y, float k, float, float, float levels) {
  const float centre = (levels + 1.f) / 2.f;
  y = static_cast<int8_t>(static_cast<int32_t>((k > 0.f ? k : 0.f) - centre));  // NaN is in the scale
}

inline float clipped(float v, float least, float levels) {
  v = v < least ? least : v;
  return v > levels ? levels : v;  // NaN stays NaN
}

template <typename T>
inline void round_near(const float* x, T* y, int64_t n, const Steps& s, float levels) {
  const auto [low, scale, least, most] = s;
  for (int64_t i = 0; i < n; ++i) put(y[i], std::rint(clipped((x[i] - low) / scale, least, most)), low, scale, levels);
}

// The steps of many ranges, each number in an array of its own.
struct ManySteps {
  const float *low, *scale, *least, *most;

  ManySteps from(int64_t i) const { return {low + i, scale + i, least + i, most + i}; }
};

constexpr int64_t CHUNK = 512;  // elements whose noise is drawn at once

// Random bits of elements that lie `step` apart when read row by row, the first at `place`; at most CHUNK.
inline void draw(uint16_t* bits, int64_t n, int64_t place, int64_t step, const Key& key) {
  uint32_t pairs[CHUNK / 2 + 1];
  uint16_t halves[CHUNK + 2];
  while (n > 0) {
    const int64_t pair = place >> 1;
    const uint32_t odd = static_cast<uint32_t>(place & 1), by = static_cast<uint32_t>(step);
    const uint32_t upper = static_cast<uint32_t>(pair >> 32), from = static_cast<uint32_t>(pair);
    const uint32_t start = key.first ^ (upper * 0x9E3779B1u), second = key.second;
    int64_t count = n, last = (n - 1) * step;
    while (count > 1 && ((place + last) >> 33 != upper || last >> 31)) {  // one `upper` and 32 bits, nearly always
      count = (count + 1) / 2;
      last = (count - 1) * step;
    }
    if (step == 1) {
      const int64_t used = (odd + count + 1) / 2;
      for (int64_t i = 0; i < used; ++i) pairs[i] = hash(from + static_cast<uint32_t>(i), start, second);
      for (int64_t i = 0; i < used; ++i) {
        halves[2 * i] = static_cast<uint16_t>(pairs[i]);
        halves[2 * i + 1] = static_cast<uint16_t>(pairs[i] >> 16);
      }
      std::memcpy(bits, halves + odd, count * sizeof *bits);
    } else {
      for (uint32_t i = 0; i < static_cast<uint32_t>(count); ++i) {
        const uint32_t far = odd + i * by;
        bits[i] = static_cast<uint16_t>(hash(from + (far >> 1), start, second) >> (16 * (far & 1)));
      }
    }
    bits += count;
    n -= count;
    place += count * step;
  }
}

template <typename T>
inline void round_drawn(const float* x, T* y, const uint16_t* bits, int64_t n, const Steps& s, float levels) {
  const auto [low, scale, least, most] = s;
  for (int64_t i = 0; i < n; ++i) {
    const float v = (x[i] - low) / scale + noise(bits[i]);
    put(y[i], std::rint(clipped(v, least, most)), low, scale, levels);
  }
}

// `place` is that of the first element, `step` how far apart the places are
template <typename T>
inline void round_noisy(const float* x, T* y, int64_t n, const Steps& s, const Grid& g, int64_t place, int64_t step) {
  uint16_t bits[CHUNK];
  for (int64_t at = 0; at < n; at += CHUNK) {
    const int64_t count = std::min(n - at, CHUNK);
    draw(bits, count, place + at * step, step, *g.key);
    round_drawn(x + at, y + at, bits, count, s, g.levels);
  }
}

// a stretch with one range for every element
template <typename T>
inline void round_columns(const float* x, T* y, int64_t n, const ManySteps& c, const Grid& g, int64_t place,
                          int64_t step) {
  const float *low = c.low, *scale = c.scale, *least = c.least, *most = c.most;
  if (g.key) {
    for (int64_t i = 0; i < n; ++i) {
      round_noisy(x + i, y + i, 1, {low[i], scale[i], least[i], most[i]}, g, place + i * step, step);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    put(y[i], std::rint(clipped((x[i] - low[i]) / scale[i], least[i], most[i])), low[i], scale[i], g.levels);
  }
}

// --- layouts -----------------------------------------------------------------------------------------------------

struct Layout {
  int64_t r1 = 1, k1 = 1, r2 = 1, k2 = 1;
  std::vector<int64_t> order;              // dimensions as they lie in memory, outermost first
  std::vector<int64_t> sizes, places;      // of those: size, and how far apart neighbours are when read row by row

  static Layout whole(int64_t n) {  // one range for n elements, read as they lie
    Layout l;
    l.r2 = n;
    return l;
  }
};

// The dimensions of a tensor without gaps as they lie in memory; nothing where there are gaps or overlaps.
optional<std::vector<int64_t>> memory_order(const Tensor& x) {
  std::vector<int64_t> order;
  for (int64_t d = 0; d < x.dim(); ++d)
    if (x.size(d) != 1) order.push_back(d);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x.stride(a) > x.stride(b); });
  int64_t expected = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if (x.stride(*d) != expected) return std::nullopt;
    expected *= x.size(*d);
  }
  return order;
}

// How a tensor without gaps falls into ranges; nothing where its dimensions alternate more often than [r1][k1][r2][k2].
optional<Layout> layout_of(const Tensor& x, const std::vector<bool>& kept) {
  auto order = memory_order(x);
  if (!order) return std::nullopt;
  Layout l;
  std::vector<int64_t> apart(x.dim(), 1);
  for (int64_t d = x.dim() - 2; d >= 0; --d) apart[d] = apart[d + 1] * x.size(d + 1);
  int64_t* at[4] = {&l.r1, &l.k1, &l.r2, &l.k2};
  std::vector<std::pair<bool, int64_t>> groups;
  for (int64_t d : *order) {
    if (!groups.empty() && groups.back().first == kept[d]) {
      groups.back().second *= x.size(d);
    } else {
      groups.emplace_back(kept[d], x.size(d));
    }
    l.order.push_back(d);
    l.sizes.push_back(x.size(d));
    l.places.push_back(apart[d]);
  }
  // from the inside: the last group is r2 or k2
  int64_t slot = 3;
  for (auto g = groups.rbegin(); g != groups.rend(); ++g, --slot) {
    if (g->first != (slot % 2 == 1)) --slot;
    if (slot < 0) return std::nullopt;
    *at[slot] = g->second;
  }
  return l;
}

// How a tensor without gaps that lies row by row falls into ranges; the way to `layout_of` for the usual cases.
optional<Layout> row_by_row(const Tensor& x, std::string_view granularity) {
  const int64_t dims = x.dim(), n = x.numel();
  Layout l = Layout::whole(n);
  l.sizes = {n};
  l.places = {1};
  if (granularity == "per_tensor" || (granularity == "per_channel" && dims < 2) ||
      (granularity == "per_position" && dims < 3)) {
    return l;
  }
  if (granularity == "per_channel") {
    l.k1 = x.size(0);
  } else if (granularity == "per_row" && dims > 0) {
    l.k1 = n / x.size(dims - 1);
  } else if (granularity == "per_position") {
    l.r1 = x.size(0);
    l.k1 = n / (x.size(0) * x.size(dims - 1));
  } else {
    return std::nullopt;
  }
  l.r2 = n / (l.r1 * l.k1);
  return l;
}

// Calls f(offset in memory, count, place of the first, step of the places) for stretches of the innermost dimension.
template <typename F>
void stretches(const Layout& l, int64_t begin, int64_t end, const F& f) {
  const int64_t dims = static_cast<int64_t>(l.sizes.size());
  if (dims == 0) {
    if (begin < end) f(begin, 1, 0, 1);
    return;
  }
  // places that follow each other in memory and when read row by row are one stretch
  int64_t inner = 1, first = dims;
  while (first > 0 && l.places[first - 1] == inner) inner *= l.sizes[--first];
  int64_t step = 1;
  if (first == dims) {
    step = l.places[dims - 1];
    inner = l.sizes[--first];
  }
  int64_t at[64], base = 0, within = begin % inner, block = begin / inner;  // counters of the outer dimensions
  for (int64_t d = first - 1; d >= 0; --d) {
    at[d] = block % l.sizes[d];
    base += at[d] * l.places[d];
    block /= l.sizes[d];
  }
  while (begin < end) {
    const int64_t count = std::min(end - begin, inner - within);
    f(begin, count, base + within * step, step);
    begin += count;
    within = 0;
    for (int64_t d = first - 1; d >= 0; --d) {
      base += l.places[d];
      if (++at[d] < l.sizes[d]) break;
      base -= at[d] * l.places[d];
      at[d] = 0;
    }
  }
}

// elements that follow each other in memory and when read row by row
template <typename T>
void round_line(const float* x, T* y, int64_t n, const Steps& s, const Grid& g, int64_t place) {
  if (g.key) {
    round_noisy(x, y, n, s, g, place, 1);
  } else {
    round_near(x, y, n, s, g.levels);
  }
}

template <typename T>
void round_stretch(const Layout& l, const float* x, T* y, int64_t begin, int64_t end, const Steps& s, const Grid& g) {
  if (g.key) {
    uint16_t bits[CHUNK];  // of elements that follow each other in memory, whatever their places: stretches are short
    int64_t drawn = 0;
    stretches(l, begin, end, [&](int64_t, int64_t n, int64_t place, int64_t step) {
      while (n > 0) {
        const int64_t count = std::min(n, CHUNK - drawn);
        draw(bits + drawn, count, place, step, *g.key);
        place += count * step;
        n -= count;
        drawn += count;
        if (drawn < CHUNK) break;
        round_drawn(x + begin, y + begin, bits, drawn, s, g.levels);
        begin += drawn;
        drawn = 0;
      }
    });
    round_drawn(x + begin, y + begin, bits, drawn, s, g.levels);
  } else {
    round_line(x + begin, y + begin, end - begin, s, g, begin);
  }
}

void ranges(const Layout& l, const float* x, float* low, float* width) {
  const int64_t count = l.k1 * l.k2, inner = l.r2 * l.k2, n = l.r1 * l.k1 * inner;
  if (count == 1) {
    std::vector<Extremes> found(at::get_num_threads());
    // from the end, which whoever made the tensor wrote last: what is read last, rounding reads first
    at::parallel_for(0, n, GRAIN, [&](int64_t begin, int64_t end) {
      for (int64_t at = end; at > begin;) {
        const int64_t count = std::min(at - begin, GRAIN / 2);
        extend(found[at::get_thread_num()], x + (at -= count), count);
      }
    });
    for (size_t i = 1; i < found.size(); ++i) join(found[0], found[i]);
    finish(found[0], *low, *width);
    return;
  }
  const int64_t grain = std::max<int64_t>(1, GRAIN / (l.r1 * inner));
  at::parallel_for(0, l.k1, grain, [&](int64_t begin, int64_t end) {
    std::vector<Extremes> found(l.k2);
    std::vector<int32_t> lows(l.k2), highs(l.k2);
    for (int64_t k = begin; k < end; ++k) {
      if (l.k2 == 1) {
        Extremes e;
        for (int64_t r = 0; r < l.r1; ++r) extend(e, x + (r * l.k1 + k) * inner, inner);
        finish(e, low[k], width[k]);
        continue;
      }
      std::fill(lows.begin(), lows.end(), Extremes().low);
      std::fill(highs.begin(), highs.end(), Extremes().high);
      for (int64_t r = 0; r < l.r1; ++r) {
        const float* row = x + (r * l.k1 + k) * inner;
        for (int64_t s = 0; s < l.r2; ++s, row += l.k2) {
          int32_t *a = lows.data(), *b = highs.data();
          for (int64_t j = 0; j < l.k2; ++j) {
            const int32_t v = load(row + j);
            a[j] = v < a[j] ? v : a[j];
            b[j] = v > b[j] ? v : b[j];
          }
        }
      }
      for (int64_t j = 0; j < l.k2; ++j) finish({lows[j], highs[j]}, low[k * l.k2 + j], width[k * l.k2 + j]);
    }
  });
}

// Rounds on given ranges, or, where `x` is read once and a range is a few rows, finds them on the way.
template <typename T>
void rounded(const Layout& l, const float* x, T* y, float* low, float* width, const Grid& g, bool find) {
  const int64_t count = l.k1 * l.k2, inner = l.r2 * l.k2, n = l.r1 * l.k1 * inner;
  if (count == 1) {
    if (find) ranges(l, x, low, width);
    const Steps s = steps_of(*low, *width, g);
    at::parallel_for(0, n, GRAIN, [&](int64_t begin, int64_t end) { round_stretch(l, x, y, begin, end, s, g); });
    return;
  }
  const bool at_once = find && l.r1 == 1 && l.k2 == 1;
  if (find && !at_once) ranges(l, x, low, width);
  const int64_t rows = l.r1 * l.k1, grain = std::max<int64_t>(1, GRAIN / inner);
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> numbers(4 * l.k2);
    float *lows = numbers.data(), *scales = lows + l.k2, *least = scales + l.k2, *most = least + l.k2;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t k = row % l.k1, from = row * inner;
      if (l.k2 == 1) {
        if (at_once) {
          Extremes e;
          extend(e, x + from, inner);
          finish(e, low[k], width[k]);
        }
        round_stretch(l, x, y, from, from + inner, steps_of(low[k], width[k], g), g);
        continue;
      }
      for (int64_t j = 0; j < l.k2; ++j) {
        const Steps s = steps_of(low[k * l.k2 + j], width[k * l.k2 + j], g);
        lows[j] = s.low;
        scales[j] = s.scale;
        least[j] = s.least;
        most[j] = s.most;
      }
      for (int64_t s = 0; s < l.r2; ++s) {
        const int64_t at = from + s * l.k2;
        stretches(l, at, at + l.k2, [&](int64_t begin, int64_t n, int64_t place, int64_t step) {
          round_columns(x + begin, y + begin, n, ManySteps{lows, scales, least, most}.from(begin - at), g, place, step);
        });
      }
    }
  });
}

// Codes of (N, C, H, W) without gaps, on one range, with the channels of a pixel beside each other.
Tensor encode_channels_last(const Tensor& x, float low, float width, const Grid& g) {
  constexpr int64_t FEW = 256;  // pixels whose codes are turned over at once
  const int64_t C = x.size(1), pixels = x.size(2) * x.size(3), blocks = (pixels + FEW - 1) / FEW;
  const Tensor codes = at::empty({x.size(0), x.size(2), x.size(3), C}, x.options().dtype(at::kChar));
  const float* from = x.const_data_ptr<float>();
  const Steps steps = steps_of(low, width, g);
  int8_t* to = codes.mutable_data_ptr<int8_t>();
  const int64_t grain = std::max<int64_t>(1, GRAIN / (FEW * C));
  at::parallel_for(0, x.size(0) * blocks, grain, [&](int64_t begin, int64_t end) {
    std::vector<int8_t> place(C * FEW);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t image = block / blocks, first = block % blocks * FEW, count = std::min(FEW, pixels - first);
      for (int64_t c = 0; c < C; ++c) {
        const int64_t at = (image * C + c) * pixels + first;
        round_line(from + at, place.data() + c * FEW, count, steps, g, at);
      }
      turn(place.data(), FEW, to + (image * pixels + first) * C, C, C, count);
    }
  });
  return codes.permute({0, 3, 1, 2});
}

}  // namespace
