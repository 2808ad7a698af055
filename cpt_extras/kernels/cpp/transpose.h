// Matrices turned over in the cache, on the way between channels first and channels last in memory.

#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define CPT_SSE
#endif

namespace {

#ifdef CPT_SSE

// 4 x 4 numbers
inline void turn_block(const float* from, int64_t apart, float* to, int64_t along) {
  __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + apart);
  __m128 c = _mm_loadu_ps(from + 2 * apart), d = _mm_loadu_ps(from + 3 * apart);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(to, a);
  _mm_storeu_ps(to + along, b);
  _mm_storeu_ps(to + 2 * along, c);
  _mm_storeu_ps(to + 3 * along, d);
}

// 16 x 16 bytes: four times row i beside row i + 8, byte by byte
inline void turn_block(const int8_t* from, int64_t apart, int8_t* to, int64_t along) {
  __m128i x[16], y[16];
  for (int i = 0; i < 16; ++i) x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * apart));
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 8]);
      y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) x[i] = y[i];
  }
  for (int i = 0; i < 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * along), x[i]);
}

#endif

// to[j][i] = from[i][j]; `apart` and `along`: from one row to the next, of either.
template <typename T>
void turn(const T* from, int64_t apart, T* to, int64_t along, int64_t rows, int64_t columns) {
  constexpr int64_t SIZE = 16 / sizeof(T);
  int64_t j = 0;
#ifdef CPT_SSE
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, int8_t>);
  for (; j + SIZE <= columns; j += SIZE) {
    int64_t i = 0;
    for (; i + SIZE <= rows; i += SIZE) turn_block(from + i * apart + j, apart, to + j * along + i, along);
    for (; i < rows; ++i)
      for (int64_t k = j; k < j + SIZE; ++k) to[k * along + i] = from[i * apart + k];
  }
#endif
  for (; j < columns; ++j)
    for (int64_t i = 0; i < rows; ++i) to[j * along + i] = from[i * apart + j];
}

}  // namespace
